"""Writing fresh keys and values into fused KV: the torch reference."""

from __future__ import annotations

import torch


def scatter_rows(
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Puts the rows of `key` and `value` into `keys` and `values`, in place.

    Args:
        key, value: [1, kv_heads, rows, head_dim].
        keys, values: [1, kv_heads, capacity, head_dim].
        slots: [rows], where the rows go, each slot at most once.
    """
    keys.index_copy_(2, slots, key)
    values.index_copy_(2, slots, value)
