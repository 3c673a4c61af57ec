"""Critical layers: whose query-to-context attention localises what the query is about (QCFuse, section
3.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# (model_type, layers, hidden size): the published top 3 by Recall@10%, 0-based, best first
_PUBLISHED = {
    ("qwen3", 36, 4096): (20, 21, 19),  # Qwen3-8B
    ("llama", 32, 4096): (14, 13, 16),  # Llama-3.1-8B
    ("mistral", 32, 4096): (15, 19, 18),  # Mistral-7B-v0.3
    ("qwen3", 40, 5120): (24, 26, 21),  # Qwen3-14B
    ("qwen3", 64, 5120): (48, 45, 50),  # Qwen3-32B
}


@dataclass(frozen=True, slots=True)
class CriticalLayers:
    """Layers, 0-based, and where they come from; `guessed` says that nobody measured them for this model."""

    layers: tuple[int, ...]
    source: str
    guessed: bool


def critical_layers(config: Any) -> CriticalLayers:
    """The published layers of this architecture, or a guess: the three in the middle of the middle third.

    Layers with a sliding window cannot see a whole context, so full-attention layers are guessed first.
    """
    layers: int = config.num_hidden_layers
    published = _PUBLISHED.get((config.model_type, layers, config.hidden_size))
    if published is not None:
        return CriticalLayers(layers=published, source="published", guessed=False)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    centre = (layers - 1) / 2
    ranked = sorted(
        range(layers),
        key=lambda layer: (
            not layers / 3 <= layer < 2 * layers / 3,
            kinds[layer] != "full_attention",
            abs(layer - centre),
            layer,
        ),
    )
    return CriticalLayers(layers=tuple(ranked[:3]), source="guessed from the middle third", guessed=True)
