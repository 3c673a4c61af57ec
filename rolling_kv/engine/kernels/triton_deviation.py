"""How far fresh keys are from stored ones, token by token, on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rolling_kv.engine.kernels.triton_launch import launch, width

_ROWS = 16


def key_deviation(current: torch.Tensor, stored: torch.Tensor, *, rows: torch.Tensor) -> torch.Tensor:
    """See `torch_deviation.key_deviation`."""
    kv_heads, count, head_dim = stored.shape
    assert current.stride(2) == stored.stride(2) == rows.stride(0) == 1
    out = stored.new_empty(count, dtype=torch.float32)
    launch(
        _deviate,
        (triton.cdiv(count, _ROWS),),
        *(current, stored, rows, out, count, kv_heads),
        *(current.stride(1), current.stride(0), stored.stride(1), stored.stride(0)),
        HEAD_DIM=head_dim,
        BLOCK_D=width(head_dim),
        ROWS=_ROWS,
    )
    return out


@triton.jit(do_not_specialize=["count", "kv_heads"])
def _deviate(
    current: tl.tensor,
    stored: tl.tensor,
    rows: tl.tensor,
    out: tl.tensor,
    count: int,
    kv_heads: int,
    current_token: int,
    current_head: int,
    stored_token: int,
    stored_head: int,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)[None, :]
    row = tl.load(rows + r, mask=r < count, other=0).to(tl.int64)[:, None]
    mask = (r < count)[:, None] & (d < HEAD_DIM)
    current += row * current_token + d
    stored += r.to(tl.int64)[:, None] * stored_token + d
    total = tl.zeros([ROWS], tl.float32)
    for _ in range(kv_heads):
        apart = tl.load(current, mask=mask, other=0.0).to(tl.float32)
        apart -= tl.load(stored, mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(apart * apart, 1)
        current += current_head
        stored += stored_head
    tl.store(out + r, total, mask=r < count)
