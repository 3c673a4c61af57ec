"""Damaged payloads on disk: found, set aside, never returned."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rolling_kv.errors import CorruptPayloadError, StoreError
from rolling_kv.store import payload as payload_module
from rolling_kv.store.disk import DiskStore
from rolling_kv.store.lineage import Lineage
from tests.store.samples import assert_same, in_dtype, kv_of, lineage

HERE, OTHER = lineage(7, 8, 9), lineage(4, 5, 6)


def payload(disk: DiskStore, where: Lineage = HERE) -> Path:
    path = disk.folder / "segments" / where.key[:2] / f"{where.key}.safetensors"
    assert path.exists()
    return path


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(path: Path, header: dict[str, Any], body: bytes) -> None:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip_in_keys(path: Path) -> None:
    header, body = header_of(path)
    damaged = bytearray(body)
    damaged[header["k"]["data_offsets"][0] + 3] ^= 0x10
    with_header(path, header, bytes(damaged))


def flip_in_values(path: Path) -> None:
    header, body = header_of(path)
    damaged = bytearray(body)
    damaged[header["v"]["data_offsets"][1] - 1] ^= 0x01
    with_header(path, header, bytes(damaged))


def flip_in_token_ids(path: Path) -> None:
    header, body = header_of(path)
    damaged = bytearray(body)
    damaged[header["token_ids"]["data_offsets"][0]] ^= 0x01
    with_header(path, header, bytes(damaged))


def swap_keys_and_values(path: Path) -> None:
    header, body = header_of(path)
    header["k"], header["v"] = header["v"], header["k"]
    with_header(path, header, body)


def values_of_another_type(path: Path) -> None:
    """The same bytes read as integers: no tensor byte changes."""
    header, body = header_of(path)
    header["v"]["dtype"] = "I32"
    with_header(path, header, body)


def heads_as_layers(path: Path) -> None:
    """The same bytes in another shape, the number of tokens unchanged."""
    header, body = header_of(path)
    for name in ("k", "v"):
        layers, heads, *rest = header[name]["shape"]
        header[name]["shape"] = [heads, layers, *rest]
    with_header(path, header, body)


def no_metadata(path: Path) -> None:
    header, body = header_of(path)
    del header["__metadata__"]
    with_header(path, header, body)


def lineage_that_is_no_json(path: Path) -> None:
    header, body = header_of(path)
    header["__metadata__"]["rolling_kv"] = "{" + header["__metadata__"]["rolling_kv"]
    with_header(path, header, body)


def lineage_of_another_namespace(path: Path) -> None:
    header, body = header_of(path)
    described = header["__metadata__"]["rolling_kv"]
    header["__metadata__"]["rolling_kv"] = described.replace('"default"', '"another"')
    assert header["__metadata__"]["rolling_kv"] != described
    with_header(path, header, body)


def another_checksum(path: Path) -> None:
    header, body = header_of(path)
    described = json.loads(header["__metadata__"]["rolling_kv"])
    header["__metadata__"]["rolling_kv"] = json.dumps(described | {"checksum": "0" * 32}, sort_keys=True)
    with_header(path, header, body)


def without_values(path: Path) -> None:
    tensors = load_file(path)
    metadata = header_of(path)[0]["__metadata__"]
    del tensors["v"]
    save_file(tensors, path, metadata=metadata)


def a_folder_in_its_place(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = [
    truncate,
    empty,
    flip_in_keys,
    flip_in_values,
    flip_in_token_ids,
    swap_keys_and_values,
    values_of_another_type,
    heads_as_layers,
    no_metadata,
    lineage_that_is_no_json,
    lineage_of_another_namespace,
    another_checksum,
    without_values,
    a_folder_in_its_place,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_payload_is_set_aside_and_can_be_stored_again(
    disk: DiskStore, damage: Callable[[Path], None]
) -> None:
    for where in (HERE, OTHER):
        disk.put(where, kv_of(where))
    path = payload(disk)
    damage(path)
    problems = disk.check_integrity()
    assert len(problems) == 1
    assert path.name in problems[0]
    quarantined = disk.folder / "quarantine" / path.name
    with pytest.raises(CorruptPayloadError, match=f"{path.name}.*quarantined as .*{path.name}"):
        disk.get(HERE)
    assert quarantined.exists()
    assert not path.exists()
    assert disk.get(HERE) is None
    assert len(disk) == 1
    assert_same(disk.get(OTHER), kv_of(OTHER))

    disk.put(HERE, kv_of(HERE))
    assert_same(disk.get(HERE), kv_of(HERE))
    assert disk.check_integrity() == []


def test_of_many_the_damaged_ones_alone_are_set_aside(disk: DiskStore, threads: int) -> None:
    wheres = [lineage(number) for number in range(12)]
    for where in wheres:
        disk.put(where, kv_of(where))
    damaged = wheres[1:9:2]
    for where in damaged:
        flip_in_values(payload(disk, where))
    found = dict(zip((where.key for where in wheres), disk.get_many(wheres), strict=True))
    for where in wheres:
        kv = found[where.key]
        if where in damaged:
            assert isinstance(kv, CorruptPayloadError)
            assert where.key in str(kv)
        else:
            assert not isinstance(kv, StoreError)
            assert_same(kv, kv_of(where))
    assert sorted(path.stem for path in (disk.folder / "quarantine").iterdir()) == sorted(
        where.key for where in damaged
    )
    assert len(disk) == len(wheres) - len(damaged)
    assert disk.check_integrity() == []


def test_a_payload_damaged_twice_is_set_aside_twice(disk: DiskStore) -> None:
    for _ in range(2):
        disk.put(HERE, kv_of(HERE))
        flip_in_keys(payload(disk))
        with pytest.raises(CorruptPayloadError):
            disk.get(HERE)
    assert disk.get(HERE) is None


def test_a_missing_payload_is_reported_once(disk: DiskStore) -> None:
    disk.put(HERE, kv_of(HERE))
    payload(disk).unlink()
    assert disk.check_integrity() == [f"{HERE.key}.safetensors is indexed and missing"]
    with pytest.raises(CorruptPayloadError, match="the file is missing"):
        disk.get(HERE)
    assert disk.get(HERE) is None
    disk.put(HERE, kv_of(HERE))
    assert_same(disk.get(HERE), kv_of(HERE))


def test_the_payload_of_another_segment_under_this_name_is_not_returned(disk: DiskStore) -> None:
    for where in (HERE, OTHER):
        disk.put(where, kv_of(where))
    shutil.copy(payload(disk, OTHER), payload(disk, HERE))
    assert len(disk.check_integrity()) == 1
    with pytest.raises(CorruptPayloadError, match="another lineage"):
        disk.get(HERE)
    assert disk.get(HERE) is None
    assert_same(disk.get(OTHER), kv_of(OTHER))


def test_the_same_segment_of_another_namespace_under_this_name_is_not_returned(disk: DiskStore) -> None:
    theirs = lineage(7, 8, 9, namespace="theirs")
    for where in (HERE, theirs):
        disk.put(where, kv_of(where))
    shutil.copy(payload(disk, theirs), payload(disk, HERE))
    with pytest.raises(CorruptPayloadError, match="another lineage"):
        disk.get(HERE)


def test_a_whole_payload_with_other_numbers_is_not_returned(folder: Path, disk: DiskStore) -> None:
    """It is sound in itself, but not what was indexed."""
    disk.put(HERE, kv_of(HERE, seed=1))
    elsewhere = DiskStore(folder.with_name("elsewhere"))
    elsewhere.put(HERE, kv_of(HERE, seed=2))
    shutil.copy(payload(elsewhere), payload(disk))
    elsewhere.close()
    assert len(disk.check_integrity()) == 1
    with pytest.raises(CorruptPayloadError, match="checksum"):
        disk.get(HERE)


def test_no_flipped_bit_anywhere_goes_unseen(disk: DiskStore) -> None:
    where = lineage(7, identity=in_dtype("bfloat16"))
    kv = kv_of(where, layers=1, heads=1, head_dim=2)
    disk.put(where, kv)
    path = payload(disk, where)
    whole = path.read_bytes()
    rng = random.Random(0)
    for index in range(len(whole)):
        damaged = bytearray(whole)
        damaged[index] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        assert disk.check_integrity() != [], f"byte {index} of {len(whole)}"
        with pytest.raises(CorruptPayloadError):
            disk.get(where)
        disk.put(where, kv)
    assert_same(disk.get(where), kv)


def test_what_the_caller_does_to_loaded_kv_does_not_reach_the_store(disk: DiskStore) -> None:
    disk.put(HERE, kv_of(HERE))
    loaded = disk.get(HERE)
    assert loaded is not None
    loaded.k.zero_()
    assert_same(disk.get(HERE), kv_of(HERE))


@pytest.mark.parametrize(
    "number", [errno.EIO, errno.EMFILE, errno.EACCES, errno.ESTALE], ids=errno.errorcode.get
)
def test_a_payload_that_the_system_cannot_read_now_stays_where_it_is(
    disk: DiskStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    disk.put(HERE, kv_of(HERE))
    path = payload(disk)
    opened = Path.open

    def fail(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self == path:
            raise OSError(number, os.strerror(number))
        return opened(self, *args, **kwargs)

    with monkeypatch.context() as broken:
        broken.setattr(Path, "open", fail)
        with pytest.raises(StoreError, match=r"could not be read .*left as it is") as caught:
            disk.get(HERE)
        assert type(caught.value) is StoreError
        assert len(disk.check_integrity()) == 1
    assert_same(disk.get(HERE), kv_of(HERE))
    assert not (disk.folder / "quarantine").exists()


def test_loaded_kv_is_mapped_and_read_once(disk: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied, and each byte goes through the checksum one time."""
    disk.put(HERE, kv_of(HERE, layers=30, head_dim=64))
    hashed: list[int] = []
    checksum = payload_module._checksum

    def counted(origin: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
        hashed.append(len(tensors))
        return checksum(origin, tensors)

    monkeypatch.setattr(payload_module, "_checksum", counted)
    loaded = disk.get(HERE)
    assert hashed == [3]
    assert loaded is not None
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if HERE.key in line]
    spans = [tuple(int(end, 16) for end in line[0].split("-")) for line in maps]
    for tensor in (loaded.k, loaded.v):
        assert any(low <= tensor.data_ptr() < high for low, high in spans)


class Trap:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.trace,))


@pytest.mark.parametrize("write", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_a_pickle_in_the_place_of_a_payload_is_not_unpickled(
    disk: DiskStore, tmp_path: Path, write: Callable[[Any, Path], None]
) -> None:
    trace = tmp_path / "trace"
    disk.put(HERE, kv_of(HERE))
    write(Trap(trace), payload(disk))
    disk.check_integrity()
    with pytest.raises(CorruptPayloadError):
        disk.get(HERE)
    assert not trace.exists()


def test_storing_and_loading_pickles_nothing(disk: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("pickle was used")

    for module, name in [(pickle, "dumps"), (pickle, "loads"), (pickle, "dump"), (pickle, "load")]:
        monkeypatch.setattr(module, name, refuse)
    for name in ("save", "load"):
        monkeypatch.setattr(torch, name, refuse)
    disk.put(HERE, kv_of(HERE))
    assert_same(disk.get(HERE), kv_of(HERE))
    header, _ = header_of(payload(disk))
    assert json.loads(header["__metadata__"]["rolling_kv"])["lineage"] == HERE.describe()
