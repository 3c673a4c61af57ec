"""Bounds of a store in a folder: quota, time to live, and what goes first."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rolling_kv.errors import ConfigError, StoreReadOnlyError
from rolling_kv.store import open_store
from rolling_kv.store.disk import DiskStore
from rolling_kv.store.eviction import surplus
from rolling_kv.store.index import SegmentRow
from tests.store.samples import assert_same, kv_of, lineage


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def size_of_one(folder: Path) -> int:
    store = DiskStore(folder.with_name("sample"))
    store.put(lineage(1), kv_of(lineage(1)))
    (row,) = store.rows()
    store.close()
    return row.bytes


def fill(store: DiskStore, clock: Clock, *numbers: int) -> None:
    for number in numbers:
        clock.now += 10
        store.put(lineage(number), kv_of(lineage(number)))


def held(store: DiskStore) -> set[int]:
    rows = {row.key for row in store.rows()}
    files = {path.stem for path in store.folder.glob("segments/*/*")}
    assert rows == files, "a file goes with its row"
    return {number for number in range(100) if lineage(number).key in rows}


@pytest.mark.parametrize(
    ("used", "gone"), [((), 1), ((1,), 2), ((1, 2), 3), ((2,), 1), ((1, 2, 3), 1)], ids=str
)
def test_the_least_recently_used_goes_first(
    folder: Path, clock: Clock, used: tuple[int, ...], gone: int
) -> None:
    store = DiskStore(folder, quota=3 * size_of_one(folder), clock=clock)
    fill(store, clock, 1, 2, 3)
    for number in used:
        clock.now += 10
        assert_same(store.get(lineage(number)), kv_of(lineage(number)))
    fill(store, clock, 4)
    assert held(store) == {1, 2, 3, 4} - {gone}
    assert store.get(lineage(gone)) is None
    assert store.check_integrity() == []
    store.close()


def test_loading_is_recorded_on_closing(folder: Path, clock: Clock) -> None:
    store = DiskStore(folder, clock=clock)
    fill(store, clock, 1, 2, 3)
    clock.now += 10
    store.get(lineage(1))
    store.close()
    again = DiskStore(folder, quota=2 * size_of_one(folder), clock=clock)
    assert held(again) == {1, 3}, "opening keeps to the quota, and 1 was used last"
    again.close()


def test_loading_takes_no_write_lock(folder: Path, clock: Clock) -> None:
    import sqlite3

    store = DiskStore(folder, clock=clock, lock_timeout=0.1, quota=10**6, ttl=10**6)
    fill(store, clock, 1)
    other = sqlite3.connect(folder / "index.sqlite")
    other.execute("begin immediate")
    try:
        assert_same(store.get(lineage(1)), kv_of(lineage(1)))
    finally:
        other.rollback()
        other.close()
    store.close()


def test_what_is_stored_last_stays_even_when_it_is_too_large(folder: Path, clock: Clock) -> None:
    store = DiskStore(folder, quota=1, clock=clock)
    fill(store, clock, 1, 2)
    assert held(store) == {2}
    store.close()


def test_what_was_not_used_for_too_long_is_gone(folder: Path, clock: Clock) -> None:
    store = DiskStore(folder, ttl=100, clock=clock)
    fill(store, clock, 1, 2)
    clock.now += 95  # 1 was used 105 seconds ago, 2 just within the bound
    assert store.get(lineage(1)) is None
    assert_same(store.get(lineage(2)), kv_of(lineage(2)))
    clock.now += 95
    assert_same(store.get(lineage(2)), kv_of(lineage(2)))
    store.put(lineage(1), kv_of(lineage(1)))
    assert_same(store.get(lineage(1)), kv_of(lineage(1)))
    clock.now += 101
    fill(store, clock, 3)
    assert held(store) == {3}
    store.close()
    clock.now += 101
    again = DiskStore(folder, ttl=100, clock=clock)
    assert held(again) == set()
    again.close()


def test_gc_says_what_it_removes_and_a_dry_run_removes_nothing(folder: Path, clock: Clock) -> None:
    size = size_of_one(folder)
    store = DiskStore(folder, clock=clock)
    fill(store, clock, 1, 2, 3, 4)
    would = store.gc(max_bytes=3 * size, max_age=25, dry_run=True)
    assert held(store) == {1, 2, 3, 4}
    did = store.gc(max_bytes=3 * size, max_age=25)
    assert did == would
    assert [row.key for row in did.removed] == [lineage(1).key]
    assert (did.freed, did.kept, did.kept_bytes) == (size, 3, 3 * size)
    assert held(store) == {2, 3, 4}
    assert store.gc().removed == ()
    store.close()


def test_anchors_go_with_their_segment(folder: Path, clock: Clock) -> None:
    store = DiskStore(folder, quota=1, clock=clock)
    fill(store, clock, 1)
    store.put_anchors(lineage(1), "kvzip:0.1", (0,))
    fill(store, clock, 2, 1)
    assert store.get_anchors(lineage(1), "kvzip:0.1") is None
    store.close()


def test_the_surplus_is_the_shortest_run_of_the_least_recently_used() -> None:
    """Compared with trying every number of segments to drop."""
    rng = random.Random(0)
    for _ in range(200):
        rows = [
            SegmentRow(str(i), "n", 1, 0, bytes=rng.randint(1, 9), checksum="", created=0, used=used)
            for i, used in enumerate(rng.sample(range(50), rng.randint(0, 8)))
        ]
        bound, oldest = rng.randint(0, 40), rng.randint(0, 50)
        ordered = sorted(rows, key=lambda row: row.used)
        expected = next(
            count
            for count in range(len(rows) + 1)
            if sum(row.bytes for row in ordered[count:]) <= bound
            and all(row.used >= oldest for row in ordered[count:])
        )
        held = sum(row.bytes for row in rows)
        assert surplus(iter(ordered), held=held, max_bytes=bound, oldest_use=oldest) == ordered[:expected]


@pytest.mark.parametrize("bounds", [{"quota": 0}, {"ttl": 0}, {"ttl": float("nan")}, {"quota": -1}])
def test_a_bound_that_is_not_positive_is_refused(folder: Path, bounds: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="expected more than 0"):
        open_store(folder, **bounds)
    assert not folder.exists()


@pytest.mark.parametrize("bounds", [{"quota": 1}, {"ttl": 1}])
def test_a_store_in_memory_has_a_bound_of_its_own(folder: Path, bounds: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="memory_limit="):
        open_store(None, **bounds)
    with pytest.raises(ConfigError, match="quota="):
        open_store(folder, memory_limit=5)
    with pytest.raises(ConfigError, match="at least 1 byte"):
        open_store(None, memory_limit=0)
    size = kv_of(lineage(1)).nbytes
    store = open_store(None, memory_limit=size)
    for number in (1, 2):
        store.put(lineage(number), kv_of(lineage(number)))
    assert len(store) == 1


def test_gc_needs_a_store_that_may_be_written(folder: Path, clock: Clock) -> None:
    writer = DiskStore(folder, clock=clock)
    fill(writer, clock, 1)
    writer.close()
    reader = DiskStore(folder, read_only=True)
    assert len(reader.gc(max_bytes=0, dry_run=True).removed) == 1
    with pytest.raises(StoreReadOnlyError, match="opened to be read"):
        reader.gc(max_bytes=0)
    reader.close()
