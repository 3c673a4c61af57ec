"""What a model's layers multiply a token with, for who counts computation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rolling_kv.engine.families import sliding_window_of


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One decoder layer.

    Args:
        weights: numbers in its matrices.
        projections: of these, the ones that make queries, keys and values.
        attention_width: query heads times head size.
        sliding_window: how far back it sees, in tokens; None when it sees everything.
    """

    weights: int
    projections: int
    attention_width: int
    sliding_window: int | None


def layer_shapes(model: Any, *, head_dim: int) -> tuple[LayerShape, ...]:
    """Of every decoder layer of a transformers model, the first first."""
    config = model.config
    layers = model.get_decoder().layers
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * len(layers)
    sliding_window = sliding_window_of(config)
    return tuple(
        LayerShape(
            weights=_weights(layer),
            projections=sum(
                _weights(getattr(layer.self_attn, name)) for name in ("q_proj", "k_proj", "v_proj")
            ),
            attention_width=config.num_attention_heads * head_dim,
            sliding_window=sliding_window if kind == "sliding_attention" else None,
        )
        for layer, kind in zip(layers, kinds, strict=True)
    )


def _weights(module: torch.nn.Module) -> int:
    """Of its matrices; norms and biases multiply no token by a matrix."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.dim() > 1)
