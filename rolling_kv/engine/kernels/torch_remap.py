"""Remapping of stored keys to request positions: the torch reference."""

from __future__ import annotations

import torch


def remap_keys(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates half-split keys by a position difference per token, in float32, back in their own dtype.

    Args:
        keys: [kv_heads, tokens, head_dim], rotated for the positions at which they were computed.
        cos, sin: [tokens, head_dim / 2], float32, of the differences.

    Returns:
        [kv_heads, tokens, head_dim], a new tensor; where the difference is 0, the same bits.
    """
    first, second = keys.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(keys.dtype)
