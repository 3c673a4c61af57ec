"""Writing fresh keys and values into fused KV on a GPU, both in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rolling_kv.engine.kernels.triton_launch import launch, width

_ROWS = 16


def scatter_rows(
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """See `torch_scatter.scatter_rows`."""
    _, kv_heads, count, head_dim = key.shape
    assert key.stride(3) == value.stride(3) == keys.stride(3) == values.stride(3) == slots.stride(0) == 1
    launch(
        _scatter,
        (triton.cdiv(count, _ROWS), kv_heads),
        *(key, value, keys, values, slots, count),
        *(key.stride(2), key.stride(1), value.stride(2), value.stride(1)),
        *(keys.stride(2), keys.stride(1), values.stride(2), values.stride(1)),
        HEAD_DIM=head_dim,
        BLOCK_D=width(head_dim),
        ROWS=_ROWS,
    )


@triton.jit(do_not_specialize=["count"])
def _scatter(
    key: tl.tensor,
    value: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    count: int,
    key_row: int,
    key_head: int,
    value_row: int,
    value_head: int,
    keys_slot: int,
    keys_head: int,
    values_slot: int,
    values_head: int,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kv_head = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)[None, :]
    slot = tl.load(slots + r, mask=r < count, other=0).to(tl.int64)[:, None]
    row = r.to(tl.int64)[:, None]
    mask = (r < count)[:, None] & (d < HEAD_DIM)
    fresh = tl.load(key + kv_head * key_head + row * key_row + d, mask=mask)
    tl.store(keys + kv_head * keys_head + slot * keys_slot + d, fresh, mask=mask)
    fresh = tl.load(value + kv_head * value_head + row * value_row + d, mask=mask)
    tl.store(values + kv_head * values_head + slot * values_slot + d, fresh, mask=mask)
