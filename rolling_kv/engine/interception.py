"""How passes reach into a transformers model: its attention function and its cache.

The whole model is called with only the rows to compute. Its attention layers call `cache.update`, which
scatters the fresh keys and values into the stitched KV and returns all of it, and then the attention
function registered here, which masks by position. A pass travels as a keyword argument of the call, so
nothing is global.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import AttentionMaskInterface

from rolling_kv.engine.kernels import sparse_row_attention

ATTENTION_NAME = "rolling_kv"

Update = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


OnQuery = Callable[[int, torch.Tensor, float, int | None], None]
"""Called at each layer with its index, the queries [1, heads, rows, head_dim], their scaling and window."""


@dataclass(frozen=True, slots=True)
class PassView:
    """What the attention function knows of a pass: where rows and keys are, and who looks at the queries.

    Args:
        rows: [rows], positions, ascending.
        positions: [keys], ascending; None for 0, 1, 2, ...
    """

    rows: torch.Tensor
    positions: torch.Tensor | None = None
    on_query: OnQuery | None = None


def register() -> None:
    """Registers the attention function with transformers; doing so again is harmless."""
    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


class PassCache(DynamicCache):  # type: ignore[misc, unused-ignore]  # untyped in some releases of transformers
    """A cache whose `update` is a pass's own; it claims to be empty, so that positions come from the pass."""

    def __init__(self, on_update: Update) -> None:
        super().__init__()
        self._on_update = on_update

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._on_update(layer_idx, key_states, value_states)

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return 0


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    rolling: PassView,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    if rolling.on_query is not None:
        rolling.on_query(module.layer_idx, query, scaling, sliding_window)
    out = sparse_row_attention(
        query,
        key,
        value,
        rows=rolling.rows,
        scaling=scaling,
        sliding_window=sliding_window,
        positions=rolling.positions,
        softcap=softcap,
        sinks=s_aux,
    )
    return out.transpose(1, 2).contiguous(), None


def _no_mask(*_: Any, **__: Any) -> None:
    """No mask is made: attention masks by position."""
