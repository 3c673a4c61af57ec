"""Attention of sparse rows over fused KV: the torch reference and the CPU path."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rolling_kv.engine.kernels.torch_staircase import staircase_attention

_BLOCK_ROWS = 256


def sparse_row_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    rows: torch.Tensor,
    scaling: float,
    sliding_window: int | None = None,
    positions: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the rows at positions `rows` over keys at `positions`; causal by position.

    A row at position p sees key j when j <= p and, with a sliding window w, p - j < w. Rows that are the
    last of the keys take torch's causal attention, other rows on a CPU `torch_staircase.py`, and what has
    more terms a mask for every block of rows.

    Args:
        query: [1, heads, rows, head_dim].
        key, value: [1, kv_heads, keys, head_dim]; heads are grouped.
        rows: [rows], ascending positions; each row sees at least one key.
        scaling: multiplies the scores.
        sliding_window: how far back a row sees, itself included, in positions.
        positions: [keys], ascending; None for 0, 1, 2, ...
        softcap: scaled scores s become softcap * tanh(s / softcap).
        sinks: [heads], scores that take part in the softmax and have no value.

    Returns:
        [1, heads, rows, head_dim].
    """
    row_count, key_count = query.shape[2], key.shape[2]
    plain = softcap is None and sinks is None
    keys = torch.arange(key_count, device=key.device) if positions is None else positions
    slides = sliding_window is not None and (positions is not None or sliding_window < key_count)
    if plain and not slides:
        counts = torch.searchsorted(keys, rows, right=True)
        unseen = key_count - row_count  # keys before the first row, when rows are the last of the keys
        if row_count > 4 * unseen and torch.equal(
            counts, torch.arange(unseen + 1, key_count + 1, device=keys.device)
        ):
            return _causal(query, key, value, scaling)
        if query.device.type == "cpu":
            return staircase_attention(query, key, value, counts=counts, scaling=scaling)
    out = torch.empty_like(query)
    for start in range(0, row_count, _BLOCK_ROWS):
        block = slice(start, min(start + _BLOCK_ROWS, row_count))
        block_rows = rows[block]
        oldest = int(block_rows[0]) - (sliding_window or 0) + 1 if slides else 0
        low = int(torch.searchsorted(keys, oldest))
        high = int(torch.searchsorted(keys, int(block_rows[-1]), right=True))
        visible = visible_keys(block_rows, keys[low:high], sliding_window if slides else None)
        part = (query[:, :, block], key[:, :, low:high], value[:, :, low:high], visible, scaling)
        out[:, :, block] = _grouped(*part) if plain else _with_terms(*part, softcap=softcap, sinks=sinks)
    return out


def visible_keys(rows: torch.Tensor, keys: torch.Tensor, sliding_window: int | None) -> torch.Tensor:
    """Which keys, by position, a row sees: none after it, and none further back than the window.

    Returns:
        [rows, keys], bool.
    """
    visible = keys[None, :] <= rows[:, None]
    if sliding_window is not None:
        visible &= rows[:, None] - keys[None, :] < sliding_window
    return visible


def group_weights(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    visible: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Softmax weights of the heads of one group, in float32.

    Args:
        query: [heads of the group, rows, head_dim].
        key: [keys, head_dim], of the group's key head.
        visible: [rows, keys].
        sinks: [heads of the group].

    Returns:
        [heads of the group, rows, keys]; with sinks they add up to less than 1.
    """
    group, rows, head_dim = query.shape
    scores = (query.reshape(group * rows, head_dim) @ key.T).float().mul_(scaling).view(group, rows, -1)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores = scores.masked_fill_(~visible, float("-inf"))
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.float()[:, None, None].expand(group, rows, 1)
    return torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    """Causal attention of rows that are the last of the keys; the few rows before them are made up."""
    before = key.shape[2] - query.shape[2]
    padded = F.pad(query, (0, 0, before, 0)) if before else query
    out = F.scaled_dot_product_attention(padded, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out[:, :, before:]


def _grouped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Attention with the heads of a group laid out as rows, so that keys are read once and never repeated."""
    _, heads, rows, head_dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    packed = query.reshape(1, kv_heads, group * rows, head_dim)
    mask = None if bool(visible.all()) else visible.repeat(group, 1)[None, None]
    out = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(1, heads, rows, head_dim)


def _with_terms(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    scaling: float,
    *,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The same with a soft cap or sinks; one key head at a time, so that not all scores are held at once."""
    group = query.shape[1] // key.shape[1]
    out = torch.empty_like(query)
    for head in range(key.shape[1]):
        own = slice(head * group, (head + 1) * group)
        weights = group_weights(
            query[0, own],
            key[0, head],
            visible=visible,
            scaling=scaling,
            softcap=softcap,
            sinks=None if sinks is None else sinks[own],
        )
        out[0, own] = weights.to(value.dtype) @ value[0, head]
    return out
