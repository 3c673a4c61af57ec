"""A safetensors file, mapped into memory: its header, and its tensors without a copy.

The library's own reader maps a file once for each tensor, and reading it then takes twice as long as through
`numpy.memmap`. What is read here is written by the library.
"""

from __future__ import annotations

import json
import os
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
}


class Mapped(NamedTuple):
    """A tensor over a mapped file, and its bytes."""

    tensor: torch.Tensor
    data: memoryview


def map_tensors(path: Path) -> tuple[dict[str, str], dict[str, Mapped]]:
    """The metadata and the tensors of a file. The mapping is private: no writing to them reaches the file.

    A mapping lives as long as a tensor of it, and keeps no file descriptor.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: it is no whole safetensors file of known dtypes.
        OSError: it is not there, or could not be read or mapped this time.
    """
    storage, size = _mapped(path)
    data = torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data
    header = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(bytes(data[8:header]))
    metadata = entries.pop("__metadata__", {})
    tensors, stop = {}, header
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = (header + offset for offset in entry["data_offsets"])
        if first != stop:
            raise ValueError(f"{name} begins at byte {first}, expected {stop}")
        if last > size:
            raise ValueError(f"{name} ends at byte {last} of {size}")
        tensors[name] = Mapped(_tensor(data, entry, first, last), data[first:last])
        stop = last
    if stop != size:
        raise ValueError(f"it has {size} bytes, and its header says {stop}")
    return metadata, tensors


def _mapped(path: Path) -> tuple[torch.UntypedStorage, int]:
    """The bytes of a file, and how many."""
    with path.open("rb", buffering=0) as file:  # whose errors say what is wrong; torch's do not
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise ValueError(f"it has {size} bytes")
        try:
            storage = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=size)
        except RuntimeError as error:
            raise OSError(f"{path} could not be mapped: {error}") from error
    return cast("torch.UntypedStorage", storage), size


def _tensor(data: memoryview, entry: dict[str, Any], first: int, last: int) -> torch.Tensor:
    dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
    count = prod(shape)
    if min(shape, default=0) < 0 or count * dtype.itemsize != last - first:
        raise ValueError(f"{entry['dtype']} {shape} does not take the bytes from {first} to {last}")
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    if first % dtype.itemsize:
        raise ValueError(f"{entry['dtype']} begins at byte {first}, which is not aligned")
    return torch.frombuffer(data, dtype=dtype, count=count, offset=first).view(shape)
