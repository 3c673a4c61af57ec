"""A safetensors file, mapped into memory: its header, and its tensors without a copy.

The library's own reader maps a file once for each tensor, and reading it then takes twice as long as through
`numpy.memmap`. What is read here is written by the library.
"""

from __future__ import annotations

import json
import mmap
from math import prod
from pathlib import Path
from typing import Any

import torch

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
}


def map_tensors(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """The metadata and the tensors of a file. The mapping is private: no writing to them reaches the file.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: it is no whole safetensors file of known dtypes.
        OSError: it is not there, or could not be read or mapped this time.
    """
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    header = 8 + int.from_bytes(mapping[:8], "little")
    entries = json.loads(mapping[8:header])
    metadata = entries.pop("__metadata__", {})
    tensors, stop = {}, header
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = (header + offset for offset in entry["data_offsets"])
        if first != stop:
            raise ValueError(f"{name} begins at byte {first}, expected {stop}")
        tensors[name] = _tensor(mapping, entry, first, last)
        stop = last
    if stop != len(mapping):
        raise ValueError(f"it has {len(mapping)} bytes, and its header says {stop}")
    return metadata, tensors


def _tensor(mapping: mmap.mmap, entry: dict[str, Any], first: int, last: int) -> torch.Tensor:
    dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
    count = prod(shape)
    if min(shape, default=0) < 0 or count * dtype.itemsize != last - first:
        raise ValueError(f"{entry['dtype']} {shape} does not take {last - first} bytes")
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mapping, dtype=dtype, count=count, offset=first).view(shape)
