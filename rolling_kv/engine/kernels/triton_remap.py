"""Remapping of stored keys to request positions on a GPU, from any tokens to any slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rolling_kv.engine.kernels.triton_launch import launch, width

_TOKENS = 32


def remap_keys(
    stored: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
    interleaved: bool = False,
) -> torch.Tensor:
    """See `torch_remap.remap_keys`."""
    kv_heads, _, head_dim = stored.shape
    count, half = cos.shape
    out = stored.new_empty((kv_heads, count, head_dim)) if out is None else out
    slots = torch.arange(count, device=stored.device) if slots is None else slots
    assert stored.stride(2) == out.stride(2) == slots.stride(0) == 1
    launch(
        _remap,
        (triton.cdiv(count, _TOKENS), kv_heads),
        *(stored, cos.contiguous(), sin.contiguous(), out, slots, tokens, count),
        *(stored.stride(1), stored.stride(0), out.stride(1), out.stride(0)),
        HALF=half,
        HALF_WIDTH=width(half),
        REST=head_dim - 2 * half,
        REST_WIDTH=width(head_dim - 2 * half),
        TOKENS=_TOKENS,
        GATHER=tokens is not None,
        INTERLEAVED=interleaved,
    )
    return out


@triton.jit(do_not_specialize=["count"])
def _remap(
    stored: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    slots: tl.tensor,
    tokens: tl.tensor,
    count: int,
    stored_token: int,
    stored_head: int,
    out_token: int,
    out_head: int,
    HALF: tl.constexpr,
    HALF_WIDTH: tl.constexpr,
    REST: tl.constexpr,
    REST_WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    GATHER: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> None:
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    kv_head = tl.program_id(1).to(tl.int64)
    kept = t < count
    source = t.to(tl.int64)
    if GATHER:
        source = tl.load(tokens + t, mask=kept, other=0).to(tl.int64)
    target = tl.load(slots + t, mask=kept, other=0).to(tl.int64)
    taken = stored + kv_head * stored_head + source[:, None] * stored_token
    placed = out + kv_head * out_head + target[:, None] * out_token

    i = tl.arange(0, HALF_WIDTH)[None, :]
    mask = kept[:, None] & (i < HALF)
    first, second = i, i + HALF
    if INTERLEAVED:
        first, second = 2 * i, 2 * i + 1
    x = tl.load(taken + first, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(taken + second, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + t[:, None] * HALF + i, mask=mask, other=1.0)
    s = tl.load(sin + t[:, None] * HALF + i, mask=mask, other=0.0)
    tl.store(placed + first, (x * c - y * s).to(out.dtype.element_ty), mask=mask)
    tl.store(placed + second, (y * c + x * s).to(out.dtype.element_ty), mask=mask)
    if REST > 0:  # a partial rope leaves the rest of the head as it is
        i = 2 * HALF + tl.arange(0, REST_WIDTH)[None, :]
        mask = kept[:, None] & (i < 2 * HALF + REST)
        tl.store(placed + i, tl.load(taken + i, mask=mask), mask=mask)
