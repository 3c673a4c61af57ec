"""Attention mass from a query to its context: the torch reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rolling_kv.engine.kernels.torch_attention import group_weights, visible_keys


def attention_mass(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    rows: torch.Tensor,
    positions: torch.Tensor,
    context: int,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention that each context token receives, summed over query tokens and heads.

    Weights are those of the full softmax, over the context and the causal query tokens (QCFuse, equation 10).
    One key head is taken at a time, so that scores of all heads are never held at once.

    Args:
        query: [1, heads, rows, head_dim].
        key: [1, kv_heads, keys, head_dim]; the first `context` are the context's, the others the query's.
        rows: [rows], positions of the query tokens, ascending.
        positions: [keys], positions of the keys, ascending.
        scaling, sliding_window, softcap, sinks: as in `sparse_row_attention`.

    Returns:
        [context], float32.
    """
    mass = torch.zeros(context, dtype=torch.float32, device=key.device)
    terms = {"scaling": scaling, "softcap": softcap}
    for weights in _weights(query, key, visible_keys(rows, positions, sliding_window), sinks, terms):
        mass += weights[..., :context].sum(dim=(0, 1))
    return mass


def attention_peak(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    rows: torch.Tensor,
    positions: torch.Tensor,
    context: int,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The most attention to each context token from a query token and head, averaged over key heads.

    Arguments are those of `attention_mass` (Kim et al., 2025, KVzip: the importance of a KV entry).

    Returns:
        [context], float32.
    """
    peak = torch.zeros(context, dtype=torch.float32, device=key.device)
    terms = {"scaling": scaling, "softcap": softcap}
    for weights in _weights(query, key, visible_keys(rows, positions, sliding_window), sinks, terms):
        peak += weights[..., :context].amax(dim=(0, 1))
    return peak / key.shape[1]


def _weights(
    query: torch.Tensor,
    key: torch.Tensor,
    visible: torch.Tensor,
    sinks: torch.Tensor | None,
    terms: dict[str, Any],
) -> Iterator[torch.Tensor]:
    """Softmax weights of one key head after the other, [heads of its group, rows, keys], float32."""
    group = query.shape[1] // key.shape[1]
    for head in range(key.shape[1]):
        own = slice(head * group, (head + 1) * group)
        own_sinks = None if sinks is None else sinks[own]
        yield group_weights(query[0, own], key[0, head], visible=visible, sinks=own_sinks, **terms)
