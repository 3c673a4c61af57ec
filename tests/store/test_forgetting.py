"""Forgetting a document: nothing that was computed from it is left, and nothing else is touched."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from rolling_kv.errors import CorruptPayloadError
from rolling_kv.store import Lineage
from rolling_kv.store.base import KVStore
from rolling_kv.store.disk import DiskStore
from rolling_kv.store.lineage import PathStep
from tests.store.samples import INSTRUCTION, assert_same, kv_of, lineage

SECRET = (41, 42, 43)
DIGEST = PathStep(SECRET, start=0).digest
ITSELF = lineage(*SECRET)
AFTER_IT = lineage(7, 8, before=[INSTRUCTION, SECRET])
APART = lineage(7, 8)
ELSEWHERE = lineage(*SECRET, namespace="elsewhere")
ALL = (ITSELF, AFTER_IT, APART, ELSEWHERE)


def fill(store: KVStore) -> None:
    for where in ALL:
        store.put(where, kv_of(where))
        store.put_anchors(where, "kvzip:0.1", (0, 2))


def test_the_document_and_all_that_saw_it_are_gone(store: KVStore) -> None:
    fill(store)
    assert store.holds(DIGEST) == sorted(where.key for where in (ITSELF, AFTER_IT, ELSEWHERE))
    assert store.forget("default", DIGEST) == 2
    assert store.holds(DIGEST) == [ELSEWHERE.key]
    for where in (ITSELF, AFTER_IT):
        assert store.get(where) is None
        assert store.get_anchors(where, "kvzip:0.1") is None
    for where in (APART, ELSEWHERE):
        assert_same(store.get(where), kv_of(where))
        assert store.get_anchors(where, "kvzip:0.1") == (0, 2)
    assert store.check_integrity() == []
    assert store.forget("default", DIGEST) == 0
    store.put(ITSELF, kv_of(ITSELF))
    assert_same(store.get(ITSELF), kv_of(ITSELF))


def test_no_byte_of_it_is_left_in_the_folder(disk: DiskStore) -> None:
    """Its digest and its keys are searched for in every file, the index and its log included."""
    fill(disk)
    disk.forget("elsewhere", DIGEST)
    disk.forget("default", DIGEST)
    traces = [DIGEST.encode(), *(where.key.encode() for where in (ITSELF, AFTER_IT, ELSEWHERE))]
    files = [path for path in disk.folder.rglob("*") if path.is_file()]
    assert any(APART.key.encode() in path.read_bytes() for path in files), "the search finds what is there"
    for path in files:
        assert [trace for trace in traces if trace in path.read_bytes()] == [], path.name
    assert [path.stem for path in disk.folder.glob("segments/*/*")] == [APART.key]


def quarantined(disk: DiskStore, path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(CorruptPayloadError):
        disk.get(ITSELF)


def quarantined_without_a_header(disk: DiskStore, path: Path) -> None:
    path.write_bytes(b"!" * 16 + path.read_bytes()[16:])
    with pytest.raises(CorruptPayloadError):
        disk.get(ITSELF)


def unindexed(disk: DiskStore, path: Path) -> None:
    """As a process leaves it that dies between renaming and indexing."""
    index = sqlite3.connect(disk.folder / "index.sqlite")
    for table in ("segments", "steps", "anchors"):
        index.execute(f"delete from {table} where key = ?", [ITSELF.key])
    index.commit()
    index.close()


def unfinished(disk: DiskStore, path: Path) -> None:
    """As a process leaves it that dies while it writes."""
    unindexed(disk, path)
    os.truncate(path, path.stat().st_size - 20)
    path.rename(disk.folder / "tmp" / f"{ITSELF.key}abc")


@pytest.mark.parametrize(
    "leave", [quarantined, quarantined_without_a_header, unindexed, unfinished], ids=lambda f: f.__name__
)
def test_files_that_the_index_does_not_know_are_found(
    disk: DiskStore, leave: Callable[[DiskStore, Path], None]
) -> None:
    fill(disk)
    leave(disk, disk.folder / "segments" / ITSELF.key[:2] / f"{ITSELF.key}.safetensors")
    if leave is not quarantined_without_a_header:
        assert ITSELF.key in disk.holds(DIGEST)
    assert disk.forget("default", DIGEST) >= 1
    assert disk.holds(DIGEST) == [ELSEWHERE.key]
    assert {path.stem for path in disk.folder.rglob("*.safetensors")} == {APART.key, ELSEWHERE.key}
    assert list((disk.folder / "tmp").iterdir()) == []


def test_a_rebuilt_index_can_forget(folder: Path) -> None:
    store = DiskStore(folder)
    fill(store)
    store.close()
    for path in folder.glob("index.sqlite*"):
        path.unlink()
    again = DiskStore(folder)
    again.rebuild()
    assert again.forget("default", DIGEST) == 2
    assert {row.key for row in again.rows()} == {APART.key, ELSEWHERE.key}
    again.close()


def test_a_digest_is_of_a_whole_segment(store: KVStore) -> None:
    near: list[Lineage] = [lineage(*SECRET, 44), lineage(*SECRET[:2]), lineage(*SECRET[::-1])]
    for where in near:
        store.put(where, kv_of(where))
    assert store.holds(DIGEST) == []
    assert store.forget("default", DIGEST) == 0
    assert len(store) == 3
