"""What one call may say: the options of `ask` and `stream`, validated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from rolling_kv.config import DEFAULT_RATIO, Pipeline, SessionConfig, require_sample, require_use_of_ratio
from rolling_kv.errors import ConfigError
from rolling_kv.policies import create_policy

if TYPE_CHECKING:
    import torch

    from rolling_kv.policies.base import Policy


Guide = Callable[[Sequence[int], "torch.Tensor"], "torch.Tensor"]
"""From an answer's tokens so far and the next logits, [vocabulary], to logits that are -inf at what must not
come."""


class PrefillOptions(TypedDict, total=False):
    """How a prompt is prefilled.

    Keys:
        answer_prefix: the answer begins with this text, which counts as prompt.
        policy, ratio, selection_layer, deviation_sample, pipeline: instead of the session's, for this call;
            the policy `full-prefill` gives the reference.
        labels: where the answer stands, (document id, first character, character after the last): the share
            of its tokens that was selected is reported as `recall`.
        measure_deviation: reports the captured deviation whatever the policy, by one more pass over all
            tokens up to the selection layer when the answer has ended.
    """

    answer_prefix: str
    policy: str
    ratio: float
    selection_layer: int
    deviation_sample: float
    pipeline: Pipeline
    labels: Sequence[tuple[str, int, int]]
    measure_deviation: bool


class AskOptions(PrefillOptions, total=False):
    """How a prompt is prefilled and its answer decoded.

    Keys:
        max_new_tokens: the answer's tokens at most (64).
        stop: strings that end the answer and are not part of it.
        temperature, top_k, top_p, seed: sampling; greedy at temperature 0, the default.
        guide: keeps the answer to a form, such as a grammar; see `Guide`.
    """

    max_new_tokens: int
    stop: str | Sequence[str]
    temperature: float
    top_k: int | None
    top_p: float
    seed: int
    guide: Guide | None


@dataclass(frozen=True, slots=True)
class PrefillSettings:
    """`PrefillOptions` over a session's configuration, validated."""

    policy: Policy
    ratio: float
    selection_layer: int
    deviation_sample: float = 1.0
    pipeline: Pipeline = "auto"
    answer_prefix: str = ""
    labels: tuple[tuple[str, int, int], ...] = ()
    measure_deviation: bool = False


def prefill_settings(config: SessionConfig, options: PrefillOptions, *, layers: int) -> PrefillSettings:
    """Validates `options` over `config` for a model of so many layers.

    Raises:
        ConfigError: an option is not as expected.
    """
    unknown = set(options) - set(PrefillOptions.__annotations__)
    if unknown:
        known = ", ".join(sorted(AskOptions.__annotations__))
        raise ConfigError(f"Unknown options {', '.join(sorted(unknown))}. Known ones: {known}.")
    prefix, labels = options.get("answer_prefix", ""), options.get("labels", ())
    if not isinstance(prefix, str):
        raise ConfigError(f"answer_prefix is {prefix!r}; expected a text.")
    if not isinstance(labels, Sequence) or not all(map(_is_label, labels)):
        raise ConfigError(
            f"labels is {labels!r}; expected (document id, first character, character after the last) each."
        )
    policy = create_policy(options.get("policy", config.policy))
    ratio = DEFAULT_RATIO if config.ratio is None else config.ratio
    if "ratio" in options:
        ratio = require_use_of_ratio(policy, options["ratio"])
    sample = require_sample(options.get("deviation_sample", config.deviation_sample))
    if sample < 1.0 and any(need.signal == "gradual-deviation" for need in policy.needs):
        raise ConfigError(
            f"{policy.name} takes the deviation of all tokens and narrows them down itself, so it cannot be "
            f"estimated from a sample. Leave out deviation_sample={sample:g}, or use token-topk."
        )
    pipeline = options.get("pipeline", config.pipeline)
    if pipeline not in ("auto", "on", "off"):
        raise ConfigError(f"pipeline is {pipeline!r}; expected auto, on or off.")
    return PrefillSettings(
        policy=policy,
        ratio=ratio,
        selection_layer=require_layer(options.get("selection_layer", config.selection_layer), layers=layers),
        deviation_sample=sample,
        pipeline=pipeline,
        answer_prefix=prefix,
        labels=tuple(labels),
        measure_deviation=options.get("measure_deviation", False),
    )


def _is_label(label: object) -> bool:
    return isinstance(label, tuple | list) and [type(part) for part in label] == [str, int, int]


def require_layer(layer: int, *, layers: int) -> int:
    """`layer` when deviations can be taken there.

    Raises:
        ConfigError
    """
    if isinstance(layer, bool) or not isinstance(layer, int) or not 1 <= layer < layers:
        raise ConfigError(
            f"selection_layer is {layer!r}; expected one of the model's layers 1 to {layers - 1}. Deviations "
            "are usually taken at layer 1."
        )
    return layer
