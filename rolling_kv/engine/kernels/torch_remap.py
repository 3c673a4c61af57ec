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
    if slots is not None and out is not None:
        return out.index_copy_(1, slots, remap_keys(taken, cos, sin, interleaved=interleaved))
    half = cos.shape[-1]
    out = torch.empty_like(taken) if out is None else out
    target = out if out.dtype == torch.float32 else torch.empty(taken.shape, device=out.device)
    _rotate(taken[..., : 2 * half].float(), cos, sin, out=target[..., : 2 * half], interleaved=interleaved)
    if target is not out:
        out[..., : 2 * half] = target[..., : 2 * half]
    out[..., 2 * half :] = taken[..., 2 * half :]
    return out


def _rotate(
    keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, out: torch.Tensor, interleaved: bool
) -> None:
    """Pairs of `keys` turned into those of `out`, a different tensor, without one for what is in between."""
    half = cos.shape[-1]
    first, second = ((slice(0, None, 2), slice(1, None, 2)), (slice(0, half), slice(half, None)))[
        not interleaved
    ]
    x, y = keys[..., first], keys[..., second]
    torch.mul(x, cos, out=out[..., first]).addcmul_(y, sin, value=-1)
    torch.mul(y, cos, out=out[..., second]).addcmul_(x, sin)
