"""Payloads: one safetensors file a segment, with its lineage and a checksum of its tensors in the header."""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from rolling_kv.errors import CorruptPayloadError
from rolling_kv.kv import SegmentKV
from rolling_kv.store.lineage import Lineage

_HEADER = "rolling_kv"


def write_payload(path: Path, folder: Path, *, lineage: Lineage, kv: SegmentKV) -> str:
    """Writes `kv` to a temporary file in `folder`, syncs it and renames it to `path`.

    Whatever goes wrong, `path` is whole or as it was before, and the temporary file is gone.

    Returns:
        xxh3-128 (hex) of the whole file, for the index.
    """
    tensors = {
        "k": kv.k.cpu().contiguous(),
        "v": kv.v.cpu().contiguous(),
        "token_ids": torch.tensor(kv.token_ids, dtype=torch.int64),
    }
    if tensors["k"].untyped_storage().data_ptr() == tensors["v"].untyped_storage().data_ptr():
        tensors["v"] = tensors["v"].clone()  # safetensors refuses tensors that share memory
    header = {"key": lineage.key, "lineage": lineage.describe(), "checksum": _tensor_checksum(tensors)}
    # One entry, since safetensors writes several in no fixed order: the same KV makes the same file.
    data = save(tensors, metadata={_HEADER: json.dumps(header, sort_keys=True)})
    descriptor, temporary = tempfile.mkstemp(prefix=lineage.key, dir=folder)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    _sync_folder(path.parent)
    return xxhash.xxh3_128_hexdigest(data)


def read_payload(path: Path, *, lineage: Lineage, checksum: str) -> SegmentKV:
    """Maps a payload into memory and verifies the file's checksum, lineage, token ids, shape and tensors.

    Raises:
        CorruptPayloadError: one of them is not what it should be, or the file cannot be read as safetensors.
    """
    found, tensors = _open(path)
    unnamed = {"name": None}  # what a model is called decides no bit
    if found["key"] != lineage.key or found["lineage"] | unnamed != lineage.describe() | unnamed:
        raise CorruptPayloadError(f"{path.name} holds another lineage than it was stored under")
    problem = verify_file(path, checksum=checksum)
    if problem is not None:
        raise CorruptPayloadError(problem)
    if tuple(tensors["token_ids"].tolist()) != lineage.segment.token_ids:
        raise CorruptPayloadError(f"{path.name} holds the KV of other tokens")
    k, v = tensors["k"], tensors["v"]
    if k.shape != v.shape or k.ndim != 4 or k.shape[2] != len(lineage.segment.token_ids):
        raise CorruptPayloadError(f"{path.name} has keys {tuple(k.shape)} and values {tuple(v.shape)}")
    if k.dtype != v.dtype or str(k.dtype) != f"torch.{lineage.identity.dtype}":
        raise CorruptPayloadError(f"{path.name} holds {k.dtype}, expected {lineage.identity.dtype}")
    if found["checksum"] != _tensor_checksum(tensors):
        raise CorruptPayloadError(f"{path.name} fails the checksum of its tensors")
    return SegmentKV(k=k, v=v, token_ids=lineage.segment.token_ids, start=lineage.segment.start)


def read_header(path: Path) -> dict[str, Any]:
    """`key`, `lineage` (as `Lineage.describe` gives it) and `checksum` of a payload whose tensors match it.

    Raises:
        CorruptPayloadError: they do not, or the file cannot be read as safetensors.
    """
    found, tensors = _open(path)
    if found["key"] != path.stem or found["checksum"] != _tensor_checksum(tensors):
        raise CorruptPayloadError(f"{path.name} fails the checksum of its tensors")
    return found


def file_checksum(path: Path) -> str:
    """xxh3-128 (hex) of the whole file."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return xxhash.xxh3_128_hexdigest(data)


def verify_file(path: Path, *, checksum: str) -> str | None:
    """What is wrong with a payload file, compared with the index, or None."""
    try:
        found = file_checksum(path)
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        return f"{path.name} cannot be read: {error}"
    return None if found == checksum else f"{path.name} fails its checksum"


def _open(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})[_HEADER])
            found = {key: header[key] for key in ("key", "lineage", "checksum")}
            return found, {name: file.get_tensor(name) for name in ("k", "v", "token_ids")}
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise CorruptPayloadError(f"{path.name} cannot be read: {error}") from error


def _tensor_checksum(tensors: dict[str, torch.Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for name in ("k", "v", "token_ids"):
        tensor = tensors[name]
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
