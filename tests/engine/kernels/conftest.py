"""Shared by the tests of kernels, which run in Triton's interpreter (`tests/conftest.py` chooses it)."""

from __future__ import annotations

import sys
from importlib import import_module

import pytest

if sys.platform != "linux":
    collect_ignore_glob = ["test_*.py"]  # triton exists for Linux alone
else:
    for subject in ("attention", "deviation", "mass", "remap", "scatter", "spans"):
        import_module(f"rolling_kv.engine.kernels.triton_{subject}")  # before a test changes the choice


@pytest.fixture(params=["torch", "triton"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each implementation in turn, forced on the dispatch."""
    monkeypatch.setenv("ROLLING_KV_KERNELS", request.param)
    return str(request.param)
