"""Payloads: one safetensors file a segment, with its lineage and a checksum of the tensors in the header."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from rolling_kv.errors import CorruptPayloadError
from rolling_kv.kv import SegmentKV
from rolling_kv.store.lineage import Lineage


def write_payload(path: Path, temporary: Path, *, lineage: Lineage, kv: SegmentKV) -> str:
    """Writes `kv` to `temporary`, syncs it and renames it to `path`; returns the checksum.

    Whatever goes wrong, `path` is whole or as it was before, and `temporary` is gone.
    """
    tensors = {
        "k": kv.k.cpu().contiguous(),
        "v": kv.v.cpu().contiguous(),
        "token_ids": torch.tensor(kv.token_ids, dtype=torch.int64),
    }
    checksum = _checksum(tensors)
    header = {
        "lineage": json.dumps(lineage.describe(), sort_keys=True),
        "key": lineage.key,
        "checksum": checksum,
    }
    try:
        with temporary.open("wb") as file:
            file.write(save(tensors, metadata=header))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)
    return checksum


def read_payload(path: Path, *, lineage: Lineage, checksum: str) -> SegmentKV:
    """Maps a payload into memory and verifies lineage, token ids, shape and checksum.

    Raises:
        CorruptPayloadError: one of them is not what it should be, or the file cannot be read as safetensors.
    """
    try:
        header, tensors = _open(path)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CorruptPayloadError(f"{path.name} cannot be read: {error}") from error
    if header.get("key") != lineage.key or json.loads(header.get("lineage", "{}")) != lineage.describe():
        raise CorruptPayloadError(f"{path.name} holds another lineage than it was stored under")
    if tuple(tensors["token_ids"].tolist()) != lineage.segment.token_ids:
        raise CorruptPayloadError(f"{path.name} holds the KV of other tokens")
    k, v = tensors["k"], tensors["v"]
    if k.shape != v.shape or k.ndim != 4 or k.shape[2] != len(lineage.segment.token_ids):
        raise CorruptPayloadError(f"{path.name} has keys {tuple(k.shape)} and values {tuple(v.shape)}")
    if str(k.dtype) != f"torch.{lineage.identity.dtype}":
        raise CorruptPayloadError(f"{path.name} holds {k.dtype}, expected {lineage.identity.dtype}")
    if not checksum == header.get("checksum") == _checksum(tensors):
        raise CorruptPayloadError(f"{path.name} fails its checksum")
    return SegmentKV(k=k, v=v, token_ids=lineage.segment.token_ids, start=lineage.segment.start)


def verify_payload(path: Path) -> str | None:
    """What is wrong with a payload on its own (its tensors against its header), or None."""
    try:
        header, tensors = _open(path)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        return f"{path.name} cannot be read: {error}"
    if header.get("key") != path.stem:
        return f"{path.name} holds the lineage {header.get('key')}"
    return None if header.get("checksum") == _checksum(tensors) else f"{path.name} fails its checksum"


def _open(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in ("k", "v", "token_ids")}
        return file.metadata() or {}, tensors


def _checksum(tensors: dict[str, torch.Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for name in ("k", "v", "token_ids"):
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
