"""Safetensors files in memory: what the library wrote, and refusal of all else."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rolling_kv.store.mapping import map_tensors

DAMAGE = (AttributeError, KeyError, TypeError, ValueError)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some.safetensors"
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4)}, path, metadata={"said": "so"})
    return path


def with_header(file: Path, change: Any) -> None:
    """Rewrites the header as `change` leaves it."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = change(json.loads(data[8:end]))
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64])
def test_what_the_library_wrote_is_there(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "a": torch.randn(3, 1, 5).to(dtype),
        "none": torch.empty(2, 0, dtype=dtype),
        "b": torch.arange(7, dtype=dtype),
    }
    save_file(tensors, tmp_path / "file", metadata={"k": "v"})
    metadata, found = map_tensors(tmp_path / "file")
    assert metadata == {"k": "v"}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].tensor.dtype == dtype
        assert torch.equal(found[name].tensor, tensor)
        assert bytes(found[name].data) == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_writing_to_a_tensor_does_not_reach_the_file(file: Path) -> None:
    before = file.read_bytes()
    map_tensors(file)[1]["a"].tensor.fill_(9)
    assert file.read_bytes() == before
    assert map_tensors(file)[1]["a"].tensor[0].tolist() == [0.0, 1.0, 2.0]


def test_tensors_keep_no_file_open(file: Path) -> None:
    """Or a store of as many documents as a process may have files could not be read."""
    before = len(os.listdir("/proc/self/fd"))
    held = [map_tensors(file) for _ in range(50)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert held[49][1]["b"].tensor.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("length", [0, 7, 8, 40, -1])
def test_a_file_that_is_cut_off_is_refused(file: Path, length: int) -> None:
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(DAMAGE):
        map_tensors(file)


def test_a_file_with_more_than_its_header_says_is_refused(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(DAMAGE):
        map_tensors(file)


CHANGES = {
    "another shape": lambda h: h | {"a": h["a"] | {"shape": [2, 4]}},
    "another dtype": lambda h: h | {"a": h["a"] | {"dtype": "F16"}},
    "an unknown dtype": lambda h: h | {"a": h["a"] | {"dtype": "F128"}},
    "a negative shape": lambda h: h | {"a": h["a"] | {"shape": [-2, -3]}},
    "a gap": lambda h: h | {"a": h["a"] | {"data_offsets": [o + 8 for o in h["a"]["data_offsets"]]}},
    "no offsets": lambda h: h | {"a": {"dtype": "F32", "shape": [2, 3]}},
    "no object": lambda h: [h],
    "a tensor that is a number": lambda h: h | {"a": 3},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_header_that_does_not_fit_is_refused(file: Path, change: str) -> None:
    with_header(file, CHANGES[change])
    with pytest.raises(DAMAGE):
        map_tensors(file)


def test_a_header_longer_than_the_file_is_refused(file: Path) -> None:
    file.write_bytes((1 << 60).to_bytes(8, "little") + file.read_bytes()[8:])
    with pytest.raises(DAMAGE):
        map_tensors(file)
