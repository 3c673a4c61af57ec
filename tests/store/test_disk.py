"""The store in a folder: reopening, failures while writing, and errors that say what to do."""

from __future__ import annotations

import errno
import os
import sqlite3
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from rolling_kv.errors import (
    CorruptPayloadError,
    StoreError,
    StoreFormatError,
    StoreFullError,
    StoreLockedError,
    StoreModelMismatchError,
    StoreReadOnlyError,
)
from rolling_kv.store import open_store
from rolling_kv.store.disk import DiskStore
from rolling_kv.store.index import FORMAT_VERSION
from tests.store.samples import IDENTITY, assert_same, kv_of, lineage

BEFORE, NOW = lineage(4, 5, 6), lineage(7, 8, 9)


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "tmp").iterdir())


def test_kv_outlives_the_store_object(folder: Path) -> None:
    first = open_store(str(folder))
    first.put(NOW, kv_of(NOW))
    first.close()
    again = open_store(folder)
    assert len(again) == 1
    assert_same(again.get(NOW), kv_of(NOW))
    assert again.check_integrity() == []
    again.close()


def test_a_folder_under_home_may_be_written_with_a_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    store = DiskStore(Path("~/made/when/missing"))
    store.close()
    assert store.folder == tmp_path / "made/when/missing"
    assert (store.folder / "index.sqlite").exists()


def test_loaded_kv_outlives_its_file(folder: Path) -> None:
    store = DiskStore(folder)
    store.put(NOW, kv_of(NOW))
    loaded = store.get(NOW)
    store.close()
    for path in folder.rglob("*.safetensors"):
        path.unlink()
    assert_same(loaded, kv_of(NOW))


def test_a_closed_store_says_so_in_its_own_terms(folder: Path) -> None:
    store = DiskStore(folder)
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.get(NOW)


def test_stale_temporary_files_are_cleared_and_fresh_ones_left(folder: Path) -> None:
    now = 1_700_000_000.0
    DiskStore(folder, clock=lambda: now).close()
    for name, age in (("stale", 3601.0), ("fresh", 3599.0)):
        path = folder / "tmp" / name
        path.touch()
        os.utime(path, (now - age, now - age))
    DiskStore(folder, clock=lambda: now).close()
    assert leftovers(folder) == ["fresh"]


def test_when_a_segment_was_stored_comes_from_the_clock(folder: Path) -> None:
    store = DiskStore(folder, clock=lambda: 1234.5)
    store.put(NOW, kv_of(NOW))
    (row,) = store._index.rows()
    store.close()
    (path,) = folder.rglob("*.safetensors")
    assert (row.key, row.namespace, row.tokens, row.context_tokens) == (NOW.key, "default", 3, 3)
    assert (row.created, row.used, row.bytes) == (1234.5, 1234.5, path.stat().st_size)


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize(
    ("failure", "raised"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), StoreFullError),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), StoreFullError),
        (OSError(errno.EROFS, os.strerror(errno.EROFS)), StoreReadOnlyError),
        (OSError(errno.EACCES, os.strerror(errno.EACCES)), StoreReadOnlyError),
        (OSError(errno.EIO, os.strerror(errno.EIO)), StoreError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
    ids=["ENOSPC", "EDQUOT", "EROFS", "EACCES", "EIO", "KeyboardInterrupt"],
)
def test_a_write_that_fails_leaves_the_store_as_it_was(
    disk: DiskStore, function: str, failure: BaseException, raised: type[BaseException]
) -> None:
    def fail(*_args: object) -> None:
        raise failure

    disk.put(BEFORE, kv_of(BEFORE))
    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(os, function, fail)
        with pytest.raises(raised) as caught:
            disk.put(NOW, kv_of(NOW))
    assert type(caught.value) is raised
    if isinstance(caught.value, StoreError):
        assert str(disk.folder) in str(caught.value)
        assert caught.value.__cause__ is failure
    assert leftovers(disk.folder) == []
    assert len(disk) == 1
    assert disk.get(NOW) is None
    assert_same(disk.get(BEFORE), kv_of(BEFORE))
    assert disk.check_integrity() == []

    disk.put(NOW, kv_of(NOW))
    assert_same(disk.get(NOW), kv_of(NOW))


def test_an_interrupt_before_indexing_leaves_no_row(disk: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_args: object, **_kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(disk._index, "add", interrupt)
        with pytest.raises(KeyboardInterrupt):
            disk.put(NOW, kv_of(NOW))
    assert (len(disk), disk.get(NOW)) == (0, None)
    disk.put(NOW, kv_of(NOW))
    assert_same(disk.get(NOW), kv_of(NOW))
    assert disk.check_integrity() == []


def test_the_file_is_synced_before_it_gets_its_name(disk: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, rename, add = os.fsync, os.replace, disk._index.add

    def seen_fsync(descriptor: int) -> None:
        events.append("sync folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "sync file")
        fsync(descriptor)

    def seen_replace(source: Path, target: Path) -> None:
        events.append("rename")
        rename(source, target)

    def seen_add(*args: object, **kwargs: object) -> None:
        events.append("index")
        add(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "replace", seen_replace)
    monkeypatch.setattr(disk._index, "add", seen_add)
    disk.put(NOW, kv_of(NOW))
    assert events == ["sync file", "rename", "sync folder", "index"]


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_folder_that_cannot_be_written_is_refused_on_opening(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(**_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(StoreReadOnlyError, match=r"cannot be written.*store=None") as caught:
        DiskStore(folder)
    assert str(folder) in str(caught.value)


def test_a_full_disk_is_reported_on_opening(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(StoreFullError, match="Free some space"):
        DiskStore(folder)


def test_a_database_that_is_locked_for_too_long(disk: DiskStore) -> None:
    disk.put(BEFORE, kv_of(BEFORE))
    other = sqlite3.connect(disk.folder / "index.sqlite")
    other.execute("begin immediate")
    try:
        with pytest.raises(StoreLockedError, match="Another process") as caught:
            disk.put(NOW, kv_of(NOW))
        assert str(disk.folder) in str(caught.value)
        assert disk.get(NOW) is None
        assert_same(disk.get(BEFORE), kv_of(BEFORE))
        with pytest.raises(StoreLockedError):
            disk.claim("default", IDENTITY)
        reader = DiskStore(disk.folder, lock_timeout=0.1)  # reading needs no lock
        assert_same(reader.get(BEFORE), kv_of(BEFORE))
        reader.close()
    finally:
        other.rollback()
        other.close()
    disk.put(NOW, kv_of(NOW))
    assert_same(disk.get(NOW), kv_of(NOW))
    assert leftovers(disk.folder) == []
    assert disk.check_integrity() == []


def test_an_index_that_is_no_database(folder: Path) -> None:
    folder.mkdir()
    (folder / "index.sqlite").write_bytes(b"this is not a database" * 100)
    with pytest.raises(StoreFormatError, match=r"damaged.*Move index\.sqlite away") as caught:
        DiskStore(folder)
    assert str(folder) in str(caught.value)


def test_an_index_of_a_later_format_is_left_alone(folder: Path) -> None:
    DiskStore(folder).close()
    index = sqlite3.connect(folder / "index.sqlite")
    index.execute(f"pragma user_version = {FORMAT_VERSION + 1}")
    index.close()
    with pytest.raises(StoreFormatError, match=f"version {FORMAT_VERSION + 1}; .* version {FORMAT_VERSION}"):
        DiskStore(folder)
    index = sqlite3.connect(folder / "index.sqlite")
    assert index.execute("pragma user_version").fetchone() == (FORMAT_VERSION + 1,)
    index.close()


def test_a_database_of_something_else_is_refused(folder: Path) -> None:
    folder.mkdir()
    other = sqlite3.connect(folder / "index.sqlite")
    other.execute("create table segments (name text)")
    other.execute("insert into segments values ('theirs')")
    other.commit()
    other.close()
    with pytest.raises(StoreFormatError, match=r"not an index of rolling_kv.*another store folder"):
        DiskStore(folder)
    other = sqlite3.connect(folder / "index.sqlite")
    assert other.execute("select name from segments").fetchall() == [("theirs",)]
    assert other.execute("select name from sqlite_master").fetchall() == [("segments",)]
    other.close()


def test_a_file_in_the_place_of_the_folder(folder: Path) -> None:
    folder.write_text("something else")
    with pytest.raises(StoreFormatError, match=r"is not a folder\. Pass store= a folder") as caught:
        DiskStore(folder)
    assert str(folder) in str(caught.value)
    assert folder.read_text() == "something else"


def test_a_namespace_belongs_to_one_model(folder: Path) -> None:
    other = replace(IDENTITY, name="tiny-qwen", model="99" * 16)
    store = DiskStore(folder)
    store.claim("default", IDENTITY)
    store.claim("default", IDENTITY)
    store.claim("other", other)
    store.close()
    again = DiskStore(folder)
    with pytest.raises(StoreModelMismatchError) as caught:
        again.claim("default", other)
    for part in ("'default'", "'tiny-llama'", "'tiny-qwen'", "111111111111", "999999999999", "namespace="):
        assert part in str(caught.value)
    again.claim("default", IDENTITY)
    again.close()


def test_a_changed_tokenizer_is_another_model_and_named_as_the_difference(disk: DiskStore) -> None:
    disk.claim("default", IDENTITY)
    with pytest.raises(StoreModelMismatchError, match=r"tokenizer.*222222222222.*888888888888"):
        disk.claim("default", replace(IDENTITY, tokenizer="88" * 16))


def test_one_namespace_holds_one_model_in_several_dtypes(disk: DiskStore) -> None:
    """Lineage keeps them apart, so nothing has to be refused."""
    disk.claim("default", IDENTITY)
    disk.claim("default", replace(IDENTITY, name="renamed", dtype="bfloat16", device="cuda"))
    assert disk.get(lineage(7, identity=replace(IDENTITY, dtype="bfloat16"))) is None


def test_the_index_can_be_rebuilt_from_the_files(folder: Path) -> None:
    store = DiskStore(folder)
    store.claim("default", IDENTITY)
    for where in (BEFORE, NOW):
        store.put(where, kv_of(where))
    rows = store.rows()
    store.close()
    for path in folder.glob("index.sqlite*"):
        path.unlink()
    again = DiskStore(folder)
    assert again.get(NOW) is None
    seen: list[tuple[int, int]] = []
    report = again.rebuild(progress=lambda done, total: seen.append((done, total)))
    assert (report.indexed, report.missing, report.damaged) == (2, (), ())
    assert seen[0] == (0, 2)
    assert seen[-1] == (2, 2)
    when = {"created": 0, "used": 0}
    assert {replace(row, **when) for row in again.rows()} == {replace(row, **when) for row in rows}
    assert again.namespaces() == {"default": replace(IDENTITY, name="")}
    again.claim("default", IDENTITY)
    assert again.namespaces() == {"default": IDENTITY}, "only the files do not say what it is called"
    for where in (BEFORE, NOW):
        assert_same(again.get(where), kv_of(where))
    again.close()


def test_rebuilding_sets_damaged_files_aside_and_forgets_missing_ones(disk: DiskStore) -> None:
    third = lineage(1, 2)
    for where in (BEFORE, NOW, third):
        disk.put(where, kv_of(where))
    paths = {path.stem: path for path in disk.folder.rglob("*.safetensors")}
    damaged = paths[NOW.key]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    paths[third.key].unlink()
    report = disk.rebuild()
    assert (report.indexed, report.missing) == (1, (third.key,))
    assert len(report.damaged) == 1
    assert damaged.name in report.damaged[0]
    assert disk.check_integrity() == []
    assert [row.key for row in disk.rows()] == [BEFORE.key]
    assert (disk.folder / "quarantine" / damaged.name).exists()


def test_provenance_is_what_a_segment_was_computed_from(disk: DiskStore) -> None:
    disk.put(NOW, kv_of(NOW))
    assert disk.provenance(NOW.key) == NOW.describe()


def test_equal_models_under_other_names_make_one_file(folder: Path) -> None:
    files = []
    for name in ("models/a", "/mnt/a copy"):
        identity = replace(IDENTITY, name=name)
        store = DiskStore(folder.with_name(name.replace("/", " ")))
        where = lineage(7, 8, identity=identity)
        store.put(where, kv_of(where))
        (path,) = store.folder.glob("segments/*/*")
        files.append((path.name, path.read_bytes()))
        store.close()
    assert files[0] == files[1]


def test_a_namespace_is_of_the_same_values_in_every_dtype(disk: DiskStore) -> None:
    disk.claim("default", replace(IDENTITY, model="aa-11"))
    disk.claim("default", replace(IDENTITY, model="aa-22", dtype="bfloat16"))
    with pytest.raises(StoreModelMismatchError):
        disk.claim("default", replace(IDENTITY, model="bb-11"))
    with pytest.raises(StoreModelMismatchError, match="float16 rounds weights"):
        disk.claim("default", replace(IDENTITY, model="cc-33", dtype="float16"))


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Without the files that SQLite makes for readers."""
    files = [path for path in folder.rglob("*") if path.is_file() and "sqlite-" not in path.name]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_looking_into_a_store_changes_nothing(folder: Path) -> None:
    writer = DiskStore(folder)
    writer.claim("default", IDENTITY)
    for where in (BEFORE, NOW):
        writer.put(where, kv_of(where))
    writer.close()
    (damaged,) = folder.glob(f"segments/*/{NOW.key}*")
    damaged.write_bytes(b"x" * 50)
    before = contents(folder)
    reader = DiskStore(folder, read_only=True)
    assert_same(reader.get(BEFORE), kv_of(BEFORE))
    with pytest.raises(CorruptPayloadError):
        reader.get(NOW)
    assert len(reader.check_integrity()) == 1
    assert reader.namespaces() == {"default": IDENTITY}
    for write in (
        lambda: reader.put(lineage(1), kv_of(lineage(1))),
        lambda: reader.forget("default", "0"),
        reader.rebuild,
    ):
        with pytest.raises(StoreReadOnlyError, match="opened to be read"):
            write()
    reader.close()
    assert contents(folder) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may act as somebody else")
def test_a_store_that_may_not_be_written_can_be_looked_into() -> None:
    """By a user who may read the folder and not write it."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "store"
        writer = DiskStore(folder)
        writer.put(NOW, kv_of(NOW))
        writer.close()
        for path in (Path(parent), *Path(parent).rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        os.seteuid(65534)
        try:
            with pytest.raises(StoreReadOnlyError):
                DiskStore(folder)
            reader = DiskStore(folder, read_only=True)
            assert_same(reader.get(NOW), kv_of(NOW))
            assert reader.check_integrity() == []
            reader.close()
        finally:
            os.seteuid(0)


def test_looking_into_a_folder_without_a_store_makes_none(folder: Path) -> None:
    folder.mkdir()
    with pytest.raises(StoreError):
        DiskStore(folder, read_only=True)
    assert list(folder.iterdir()) == []


def test_a_failure_in_a_transaction_undoes_all_of_it(
    disk: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise KeyboardInterrupt

    disk.put(BEFORE, kv_of(BEFORE))
    disk._quota = 1
    with monkeypatch.context() as broken:
        broken.setattr(disk, "_remove", fail)
        with pytest.raises(KeyboardInterrupt):
            disk.put(NOW, kv_of(NOW))
    assert [row.key for row in disk.rows()] == [BEFORE.key]
    assert disk._index.keys_with(NOW.segment.digest) == []
    disk.put(NOW, kv_of(NOW))
    assert [row.key for row in disk.rows()] == [NOW.key]
