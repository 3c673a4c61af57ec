"""Payloads: one safetensors file a segment, with its lineage and a checksum of both in the header."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import save

from rolling_kv.errors import CorruptPayloadError
from rolling_kv.kv import SegmentKV
from rolling_kv.store.lineage import LINEAGE_VERSION, Lineage
from rolling_kv.store.mapping import Mapped, map_tensors

_HEADER = "rolling_kv"
_TENSORS = ("k", "v", "token_ids")
_LONGEST_HEADER = 100_000_000  # bytes, safetensors' own bound


def write_payload(folder: Path, *, lineage: Lineage, kv: SegmentKV) -> tuple[Path, str]:
    """Writes `kv` to a temporary file in `folder` and syncs it; `publish` gives it its name.

    Returns:
        The file, and the checksum that its header holds, for the index. When writing fails there is no file.
    """
    tensors = {
        "k": kv.k.cpu().contiguous(),
        "v": kv.v.cpu().contiguous(),
        "token_ids": torch.tensor(kv.token_ids, dtype=torch.int64),
    }
    if tensors["k"].untyped_storage().data_ptr() == tensors["v"].untyped_storage().data_ptr():
        tensors["v"] = tensors["v"].clone()  # safetensors refuses tensors that share memory
    origin = {"key": lineage.key, "lineage": lineage.describe()}
    checksum = _checksum(origin, {name: Mapped(tensor, _bytes(tensor)) for name, tensor in tensors.items()})
    # One entry, since safetensors writes several in no fixed order: the same KV makes the same file.
    data = save(tensors, metadata={_HEADER: json.dumps(origin | {"checksum": checksum}, sort_keys=True)})
    descriptor, name = tempfile.mkstemp(prefix=lineage.key, dir=folder)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return Path(name), checksum


def publish(temporary: Path, path: Path) -> None:
    """Renames a written payload to `path`, durably."""
    path.parent.mkdir(exist_ok=True)
    os.replace(temporary, path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_payload(path: Path, *, lineage: Lineage, checksum: str) -> SegmentKV:
    """Maps a payload into memory, verifies what was mapped, and returns it without a copy.

    The mapping is private: what is done to the tensors does not reach the file.

    Raises:
        CorruptPayloadError: it is not what was stored under that lineage.
        OSError: it is not there, or could not be read this time.
    """
    found, mapped = _open(path)
    if found["key"] != lineage.key or found["lineage"] != lineage.describe():
        raise CorruptPayloadError(f"{path.name} holds another lineage than it was stored under")
    _require_checksum(path, found, mapped, indexed=checksum)
    k, v, token_ids = (mapped[name].tensor for name in _TENSORS)
    if tuple(token_ids.tolist()) != lineage.segment.token_ids:
        raise CorruptPayloadError(f"{path.name} holds the KV of other tokens")
    if k.shape != v.shape or k.ndim != 4 or k.shape[2] != len(lineage.segment.token_ids):
        raise CorruptPayloadError(f"{path.name} has keys {tuple(k.shape)} and values {tuple(v.shape)}")
    if k.dtype != v.dtype or str(k.dtype) != f"torch.{lineage.identity.dtype}":
        raise CorruptPayloadError(f"{path.name} holds {k.dtype}, expected {lineage.identity.dtype}")
    return SegmentKV(k=k, v=v, token_ids=lineage.segment.token_ids, start=lineage.segment.start)


def read_header(path: Path, *, checksum: str | None = None) -> dict[str, Any]:
    """`key`, `lineage` (as `Lineage.describe` gives it) and `checksum` of a payload, verified.

    Args:
        checksum: what the index says, when it is to be compared as well.

    Raises:
        CorruptPayloadError: the payload is not what its name, its header or `checksum` says.
        OSError: it is not there, or could not be read this time.
    """
    found, mapped = _open(path)
    if found["key"] != path.stem:
        raise CorruptPayloadError(f"{path.name} holds another lineage than it was stored under")
    _require_checksum(path, found, mapped, indexed=checksum)
    return found


def read_origin(path: Path) -> dict[str, Any]:
    """`key` and `lineage` as the header has them, nothing verified: of a file that is cut off, too.

    Raises:
        CorruptPayloadError: there is no such header.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, _LONGEST_HEADER)))
        origin = json.loads(header["__metadata__"][_HEADER])
        return {"key": origin["key"], "lineage": origin["lineage"]}
    except (IsADirectoryError, KeyError, TypeError, ValueError) as error:
        raise CorruptPayloadError(f"{path.name} has no readable header: {error}") from error


def _open(path: Path) -> tuple[dict[str, Any], dict[str, Mapped]]:
    try:
        metadata, mapped = map_tensors(path)
        header = json.loads(metadata[_HEADER])
        found = {key: header[key] for key in ("key", "lineage", "checksum")}
        mapped = {name: mapped[name] for name in _TENSORS}
        if found["lineage"]["version"] != LINEAGE_VERSION:
            raise CorruptPayloadError(f"{path.name} was written by a release of another format")
        return found, mapped
    except (IsADirectoryError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptPayloadError(f"{path.name} cannot be read: {error}") from error


def _require_checksum(
    path: Path, found: dict[str, Any], mapped: dict[str, Mapped], *, indexed: str | None
) -> None:
    origin = {"key": found["key"], "lineage": found["lineage"]}
    if found["checksum"] != _checksum(origin, mapped) or indexed not in (None, found["checksum"]):
        raise CorruptPayloadError(f"{path.name} fails its checksum")


def _checksum(origin: dict[str, Any], mapped: dict[str, Mapped]) -> str:
    """xxh3-128 (hex) of key, lineage and tensors."""
    digest = xxhash.xxh3_128(json.dumps(origin, sort_keys=True).encode())
    for name in _TENSORS:
        tensor, data = mapped[name]
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(data)
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> memoryview:
    data: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return data
