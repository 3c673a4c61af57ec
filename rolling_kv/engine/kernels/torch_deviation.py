"""How far fresh keys are from stored ones, token by token: the torch reference."""

from __future__ import annotations

import torch


def key_deviation(current: torch.Tensor, stored: torch.Tensor, *, rows: torch.Tensor) -> torch.Tensor:
    """d_i = |K_i(current) - K_i(stored)|^2, summed over heads (Yao et al., 2025, section 4).

    Args:
        current: [kv_heads, capacity, head_dim].
        stored: [kv_heads, rows, head_dim].
        rows: [rows], where in `current` the tokens of `stored` are.

    Returns:
        [rows], float32.
    """
    return (current[:, rows].float() - stored.float()).square().sum(dim=(0, 2))
