"""Several processes on one store, and one that is killed while it writes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rolling_kv.errors import CorruptPayloadError
from rolling_kv.kv import SegmentKV
from rolling_kv.store import disk as disk_module
from rolling_kv.store.disk import DiskStore
from rolling_kv.store.folder import StoreFolder
from tests.store.samples import assert_same, kv_of, lineage

ROOT = Path(__file__).parents[2]

WRITER = """
import sys
from pathlib import Path
from rolling_kv.store.disk import DiskStore
from tests.store.samples import IDENTITY, kv_of, lineage

folder, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
sys.stdin.readline()  # until every writer is ready
store = DiskStore(folder)
store.claim("default", IDENTITY)
for number in range(first, last):
    where = lineage(number, number + 1)
    store.put(where, kv_of(where, seed=number))
    print(number, flush=True)
store.close()
"""


def start_writer(folder: Path, first: int, last: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(first), str(last)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_lose_nothing(folder: Path) -> None:
    """They open the store at once, and half of what they write is the same."""
    writers = [start_writer(folder, 0, 40), start_writer(folder, 20, 60)]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        _, errors = writer.communicate(timeout=60)
        assert writer.returncode == 0, errors
    store = DiskStore(folder)
    assert len(store) == 60
    assert store.check_integrity() == []
    for number in range(60):
        where = lineage(number, number + 1)
        assert_same(store.get(where), kv_of(where, seed=number))
    store.close()
    assert list((folder / "tmp").iterdir()) == []


def test_a_process_that_is_killed_while_writing_leaves_a_valid_store(folder: Path) -> None:
    writer = start_writer(folder, 0, 1_000_000)
    assert writer.stdin is not None
    assert writer.stdout is not None
    writer.stdin.write("go\n")
    writer.stdin.flush()
    stored = [int(writer.stdout.readline()) for _ in range(5)]
    time.sleep(0.05)  # it writes on; where the signal strikes is left to chance
    writer.send_signal(signal.SIGKILL)
    rest, _ = writer.communicate(timeout=60)
    assert writer.returncode == -signal.SIGKILL
    stored += [int(line) for line in rest.splitlines(keepends=True) if line.endswith("\n")]

    store = DiskStore(folder)
    assert store.check_integrity() == []
    for number in stored:
        where = lineage(number, number + 1)
        assert_same(store.get(where), kv_of(where, seed=number))
    assert len(stored) <= len(store) <= len(stored) + 1  # one may be indexed and not yet reported
    for number in range(len(stored) + 3):
        where = lineage(number, number + 1)
        store.put(where, kv_of(where, seed=number))
    assert len(store) == len(stored) + 3
    assert store.check_integrity() == []
    store.close()


def test_a_payload_that_was_put_again_meanwhile_is_not_set_aside(
    disk: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process finds it damaged; before it acts, another one has set it aside and stored it anew."""
    where = lineage(7, 8)
    disk.put(where, kv_of(where))
    (path,) = disk.folder.glob("segments/*/*")
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    read, other = disk_module.read_payload, DiskStore(disk.folder)

    def read_late(*args: Any, **kwargs: Any) -> SegmentKV:
        monkeypatch.undo()
        try:
            return read(*args, **kwargs)
        finally:
            with pytest.raises(CorruptPayloadError):
                other.get(where)
            other.put(where, kv_of(where))

    monkeypatch.setattr(disk_module, "read_payload", read_late)
    assert_same(disk.get(where), kv_of(where))
    assert path.exists()
    assert len(disk) == 1
    other.close()


def test_a_payload_that_was_evicted_meanwhile_is_a_miss(
    disk: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = lineage(7, 8)
    disk.put(where, kv_of(where))
    read, other = disk_module.read_payload, DiskStore(disk.folder)

    def read_late(*args: Any, **kwargs: Any) -> SegmentKV:
        monkeypatch.undo()
        other.gc(max_bytes=0)
        return read(*args, **kwargs)

    monkeypatch.setattr(disk_module, "read_payload", read_late)
    assert disk.get(where) is None
    assert not (disk.folder / "quarantine").exists()
    other.close()


def test_what_is_stored_while_an_index_is_rebuilt_stays_indexed(
    disk: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, late = lineage(1), lineage(2)
    disk.put(first, kv_of(first))
    listed, other = StoreFolder.payloads, DiskStore(disk.folder)

    def list_then_store(files: StoreFolder) -> list[Path]:
        paths = listed(files)
        other.put(late, kv_of(late))
        return paths

    monkeypatch.setattr(StoreFolder, "payloads", list_then_store)
    report = disk.rebuild()
    assert report.missing == ()
    assert {row.key for row in disk.rows()} == {first.key, late.key}
    assert_same(disk.get(late), kv_of(late))
    other.close()


def test_what_is_evicted_while_an_index_is_rebuilt_is_not_damaged(
    disk: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = lineage(1)
    disk.put(where, kv_of(where))
    listed, other = StoreFolder.payloads, DiskStore(disk.folder)

    def list_then_evict(files: StoreFolder) -> list[Path]:
        paths = listed(files)
        other.gc(max_bytes=0)
        return paths

    monkeypatch.setattr(StoreFolder, "payloads", list_then_evict)
    report = disk.rebuild()
    assert (report.indexed, report.damaged) == (0, ())
    assert disk.check_integrity() == []
    other.close()
