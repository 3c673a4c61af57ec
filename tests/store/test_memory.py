"""The store in memory: bounded, and least recently used goes first."""

from __future__ import annotations

import pytest

from rolling_kv.store import open_store
from rolling_kv.store.memory import MemoryStore
from tests.store.samples import assert_same, kv_of, lineage

SIZE = kv_of(lineage(0)).nbytes


def test_no_folder_means_memory() -> None:
    assert isinstance(open_store(None), MemoryStore)


@pytest.mark.parametrize(
    ("used", "dropped"), [((), 1), ((1,), 2), ((1, 2), 3), ((2,), 1), ((1, 2, 3), 1)], ids=str
)
def test_the_least_recently_used_is_dropped_first(used: tuple[int, ...], dropped: int) -> None:
    store = MemoryStore(limit=3 * SIZE)
    for number in (1, 2, 3):
        store.put(lineage(number), kv_of(lineage(number)))
    for number in used:
        assert store.get(lineage(number)) is not None
    store.put(lineage(4), kv_of(lineage(4)))
    assert {number for number in range(1, 5) if store.get(lineage(number)) is None} == {dropped}
    assert store.check_integrity() == []


def test_storing_again_counts_once() -> None:
    store = MemoryStore(limit=2 * SIZE)
    store.put(lineage(1), kv_of(lineage(1)))
    for _ in range(3):
        store.put(lineage(2), kv_of(lineage(2)))
    assert len(store) == 2
    assert store.check_integrity() == []


def test_one_segment_larger_than_the_limit_is_kept_alone() -> None:
    store = MemoryStore(limit=SIZE)
    store.put(lineage(1), kv_of(lineage(1)))
    large = lineage(*range(50))
    store.put(large, kv_of(large))
    assert_same(store.get(large), kv_of(large))
    assert store.get(lineage(1)) is None
    store.put(lineage(2), kv_of(lineage(2)))
    assert (store.get(large), len(store)) == (None, 1)
    assert store.check_integrity() == []


def test_closing_forgets() -> None:
    store = MemoryStore()
    store.put(lineage(1), kv_of(lineage(1)))
    store.close()
    assert len(store) == 0
    assert store.get(lineage(1)) is None
    assert store.check_integrity() == []


def test_a_wrong_count_is_seen() -> None:
    store = MemoryStore()
    store.put(lineage(1), kv_of(lineage(1)))
    store._bytes += 1
    assert store.check_integrity() == [f"counts {SIZE + 1} bytes and holds {SIZE}"]
