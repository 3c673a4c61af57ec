"""The reference that we did not write: transformers' own forward, attention and cache."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from rolling_kv.engine.host import TransformersHost
from rolling_kv.engine.interception import ATTENTION_NAME


@contextmanager
def stock_attention(engine: TransformersHost):  # type: ignore[no-untyped-def]
    model: Any = engine._model
    model.set_attn_implementation("eager")
    try:
        yield model
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def stock_logits(engine: TransformersHost, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits of every position, [tokens, vocabulary]."""
    with torch.inference_mode(), stock_attention(engine) as model:
        logits: torch.Tensor = model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        return logits


def stock_kv(
    engine: TransformersHost, token_ids: Sequence[int], *, start: int = 0
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of every layer, [kv_heads, tokens, head_dim], prefilled at positions from `start`
    on."""
    cache = DynamicCache()
    positions = torch.arange(start, start + len(token_ids))[None]
    with torch.inference_mode(), stock_attention(engine) as model:
        model(torch.tensor([list(token_ids)]), position_ids=positions, cache=cache, use_cache=True)
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]
