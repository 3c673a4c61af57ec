"""A store of each kind, and one on disk, closed after the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rolling_kv.store import open_store
from rolling_kv.store.base import KVStore
from rolling_kv.store.disk import DiskStore


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def disk(folder: Path) -> Iterator[DiskStore]:
    store = DiskStore(folder, lock_timeout=0.2)
    yield store
    store.close()


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, folder: Path) -> Iterator[KVStore]:
    """Both kinds keep the same contract."""
    store = open_store(folder if request.param == "disk" else None)
    yield store
    store.close()


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """As many as torch computes with."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
