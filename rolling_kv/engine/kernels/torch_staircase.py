"""Attention of rows that each see a beginning of the keys, as dense products nearly without a mask.

Rows and the keys that they see form a staircase. It is covered with rectangles, the largest first, within
which every row sees every key; only what is left between neighbouring rows needs a mask. The parts of a row
are joined by their log-sum-exp (Dao et al., 2022). Torch's flash attention on a CPU is nearly twice as fast
on a tall rectangle as on a low or a masked one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

_LOSS = 8192
"""Scores computed in vain, a masked one counting for an eighth, that are as dear as one more part."""


class Part(NamedTuple):
    """Rows `first` to `stop` over keys `low` to `high`; `masked`: some of the rows do not see all of them."""

    first: int
    stop: int
    low: int
    high: int
    masked: bool


def staircase_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, counts: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Attention of rows of which row i sees the first `counts[i]` keys. On a CPU only.

    Args:
        query: [1, heads, rows, head_dim].
        key, value: [1, kv_heads, keys, head_dim]; heads are grouped.
        counts: [rows], ascending, at least 1.
        scaling: multiplies the scores.

    Returns:
        [1, heads, rows, head_dim].
    """
    _, heads, rows, head_dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    # The heads of a group lie beside each other as rows: keys are read once, and rectangles are tall.
    grouped = query.reshape(kv_heads, group, rows, head_dim).transpose(1, 2)
    packed = grouped.reshape(1, kv_heads, rows * group, head_dim)
    out = torch.empty(packed.shape, dtype=torch.float32)
    mass = torch.empty(packed.shape[:3], dtype=torch.float32)  # log-sum-exp of the scores so far
    for first, stop, low, high, masked in staircase(tuple(counts.tolist())):
        own = slice(first * group, stop * group)
        mask = _mask(counts[first:stop], low, high, group, query.dtype) if masked else None
        part, part_mass = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            packed[:, :, own], key[:, :, low:high], value[:, :, low:high], attn_mask=mask, scale=scaling
        )
        if low == 0:  # of every row the first
            out[:, :, own], mass[:, :, own] = part, part_mass
            continue
        weight = (part_mass - mass[:, :, own]).sigmoid_()
        out[:, :, own] = out[:, :, own].lerp_(part.float(), weight[..., None])
        mass[:, :, own] = mass[:, :, own].logaddexp(part_mass)
    joined = out.view(kv_heads, rows, group, head_dim).transpose(1, 2)
    return joined.reshape(1, heads, rows, head_dim).to(query.dtype)


@lru_cache(maxsize=8)
def staircase(counts: tuple[int, ...]) -> tuple[Part, ...]:
    """The parts that cover what rows see, each key of a row once; every row's first part begins at key 0.

    Args:
        counts: how many keys each row sees, ascending, at least 1.
    """
    return tuple(_cover(torch.tensor(counts), 0, len(counts), 0))


def _cover(counts: torch.Tensor, first: int, stop: int, low: int) -> list[Part]:
    """The parts of rows `first` to `stop` over the keys from `low` on."""
    first += int(torch.searchsorted(counts[first:stop], low, right=True))
    if first == stop:
        return []
    own = counts[first:stop]
    high = int(own[-1])
    in_vain = int((high - own).sum())
    if in_vain == 0 or in_vain + (stop - first) * (high - low) // 8 <= _LOSS:
        return [Part(first, stop, low, high, masked=in_vain > 0)]
    areas = torch.arange(stop - first, 0, -1) * (own - low)
    split = first + int(areas.argmax())
    edge = int(counts[split])
    return [
        Part(split, stop, low, edge, masked=False),
        *_cover(counts, first, split, low),
        *_cover(counts, split, stop, edge),
    ]


def _mask(counts: torch.Tensor, low: int, high: int, group: int, dtype: torch.dtype) -> torch.Tensor:
    """What is added to scores, -inf where a row does not see a key; [rows * group, keys]."""
    hidden = torch.arange(low, high) >= counts[:, None]
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return mask.repeat_interleave(group, dim=0)
