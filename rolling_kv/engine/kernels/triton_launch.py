"""How Triton kernels are launched: the one call, the machine they are launched for, and their block sizes.

Block sizes are fixed by shapes and dtype, never tuned by timing: the order of additions, and with it the last
bits of an answer, must not depend on which of two variants happened to run faster.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""The kernels of this process run in Triton's interpreter (TRITON_INTERPRET=1 before triton was imported)."""

WIDE = tl.constexpr(INTERPRETED)  # the interpreter keeps bfloat16 as bit patterns and cannot multiply them

ENDLESS = 1 << 30
"""A sliding window that reaches further back than any position."""


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Any, warps: int = 4, stages: int = 2, **constants: Any
) -> None:
    """Runs a kernel over a grid; every launch of this package goes through here.

    Args:
        args: tensors and numbers, as the kernel names them.
        warps, stages: of the compiled kernel; they do not change what it computes.
        constants: its `tl.constexpr` parameters.
    """
    # Whether products and sums are fused decides the last bits: it is said here, not left to a default.
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    # Triton launches on the current device, wherever the tensors are.
    with torch.cuda.device_of(args[0]):  # type: ignore[no-untyped-call]
        kernel[grid](*args, **options, **constants)


def width(size: int) -> int:
    """The next power of two, at least 16: the sizes that blocks can have and `tl.dot` takes."""
    return max(16, 1 << (size - 1).bit_length())


def key_block(head_dim: int, dtype: torch.dtype) -> int:
    """Keys a step: few in float32, whose products are made without matrix units and take registers."""
    if dtype.itemsize > 2:
        return 16
    return 64 if width(head_dim) <= 128 else 32


def row_block(packed_rows: int, head_dim: int, dtype: torch.dtype) -> int:
    """Rows of a block (query tokens times the heads of a group): 16 for a few, else what registers hold."""
    if packed_rows <= 16:
        return 16
    if dtype.itemsize > 2:
        return 32
    return 128 if width(head_dim) == 128 else 64


def warps(block: int, head_dim: int) -> int:
    """Warps of a block of rows."""
    return 4 if block == 16 or width(head_dim) <= 64 else 8


def splits(programs: int, *, keys: int, step: int) -> int:
    """Into how many parts to split the keys, so that few rows over many keys still fill a GPU.

    Decided by shapes alone, so that bits do not depend on which GPU it is.
    """
    return max(1, min(256 // programs, keys // (4 * step), 32))
