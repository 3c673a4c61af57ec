"""Shared by the tests of kernels, which run in Triton's interpreter (`tests/conftest.py` chooses it)."""

from __future__ import annotations

import sys

import pytest

if sys.platform != "linux":
    collect_ignore_glob = ["test_*.py"]  # triton exists for Linux alone


@pytest.fixture(params=["torch", "triton"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each implementation in turn, forced on the dispatch."""
    monkeypatch.setenv("ROLLING_KV_KERNELS", request.param)
    return str(request.param)
