"""Remapping of stored keys to request positions: the torch reference."""

from __future__ import annotations

import torch


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
    """Rotates keys by a position difference per token, in float32, and puts them where they belong.

    The first 2 * half dimensions of a head are rotated, the others are copied (partial rope). A pair is
    (i, i + half), or (2i, 2i + 1) when `interleaved`.

    Args:
        stored: [kv_heads, stored tokens, head_dim], rotated for the positions at which they were computed.
        cos, sin: [tokens, half], float32, of the differences.
        out: [kv_heads, capacity, head_dim], of the same dtype, to write into; a new tensor by default.
        slots: [tokens], where in `out` they go; 0, 1, 2, ... by default.
        tokens: [tokens], which of the stored tokens are taken; all by default.

    Returns:
        `out`. Where the difference is 0, the same bits as in `stored`.
    """
    taken = stored if tokens is None else stored[:, tokens]
    half = cos.shape[-1]
    turned, rest = taken[..., : 2 * half].float(), taken[..., 2 * half :]
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    pairs = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    moved = torch.cat((turned.to(stored.dtype), rest), dim=-1)
    if out is None:
        return moved
    return out.index_copy_(1, slots, moved) if slots is not None else out.copy_(moved)
