"""Traits of a model that selectors use: its critical layers, and the tokens that become attention sinks.

They come from a profile measured for exactly this model (`rolling-kv profile`), from measurements published
for its architecture, or, for critical layers, from a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rolling_kv.engine.profiles import ModelProfile
from rolling_kv.errors import ConfigError

# (model_type, layers, hidden size): the top 3 by Recall@10%, 0-based, best first (QCFuse, section 3.4)
_PUBLISHED = {
    ("qwen3", 36, 4096): (20, 21, 19),  # Qwen3-8B
    ("llama", 32, 4096): (14, 13, 16),  # Llama-3.1-8B
    ("mistral", 32, 4096): (15, 19, 18),  # Mistral-7B-v0.3
    ("qwen3", 40, 5120): (24, 26, 21),  # Qwen3-14B
    ("qwen3", 64, 5120): (48, 45, 50),  # Qwen3-32B
}


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What is known of a model; layers are 0-based.

    Args:
        critical_layers: whose query-to-context attention localises what the query is about, best first.
        critical_source: where they come from.
        critical_guessed: nobody measured them for this model.
        sink_token_ids: tokens that become attention sinks in a full prefill; empty when none are known.
        sink_layer: where their keys show it, None when none are known.
        sink_source: where that comes from.
    """

    critical_layers: tuple[int, ...]
    critical_source: str
    critical_guessed: bool
    sink_token_ids: frozenset[int] = frozenset()
    sink_layer: int | None = None
    sink_source: str = "never measured; `rolling-kv profile` does"


def with_critical_layers(traits: ModelTraits, given: Sequence[int], *, layers: int) -> ModelTraits:
    """`traits` of a model of so many layers, with these critical layers.

    Raises:
        ConfigError: they are no layers of the model.
    """
    if len(set(given)) < len(given) or not all(type(one) is int and 0 <= one < layers for one in given):
        raise ConfigError(
            f"critical_layers is {list(given)}; expected different layers of the model, 0 to {layers - 1}."
        )
    return replace(traits, critical_layers=tuple(given), critical_source="given", critical_guessed=False)


def traits_of(config: Any, profile: ModelProfile | None) -> ModelTraits:
    """The traits of the model with this configuration, by its `profile` when it has one."""
    if profile is not None:
        return ModelTraits(
            critical_layers=profile.critical_layers,
            critical_source="measured for this model",
            critical_guessed=False,
            sink_token_ids=frozenset(profile.sink_token_ids),
            sink_layer=profile.sink_layer,
            sink_source="measured for this model",
        )
    published = _PUBLISHED.get((config.model_type, config.num_hidden_layers, config.hidden_size))
    if published is not None:
        return ModelTraits(critical_layers=published, critical_source="published", critical_guessed=False)
    return ModelTraits(
        critical_layers=_guess(config), critical_source="guessed from the middle third", critical_guessed=True
    )


def _guess(config: Any) -> tuple[int, ...]:
    """The three layers in the middle of the middle third, full attention first.

    Layers with a sliding window cannot see a whole context.
    """
    layers: int = config.num_hidden_layers
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
    return tuple(ranked[:3])
