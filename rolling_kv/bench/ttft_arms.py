"""Arms of `rolling-kv bench ttft`: `policy[@ratio][~sample][+pipeline][:conditioning][+tail<n>]`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rolling_kv.bench.arms import parse_sampled_arm
from rolling_kv.errors import ConfigError
from rolling_kv.policies import create_policy

_PIPELINE = "+pipeline"


@dataclass(frozen=True, slots=True)
class TtftArm:
    """A way to reuse.

    Args:
        fresh_tail: so many of the newest documents are computed in every call.
        sample: the share of each document's tokens whose deviation is computed.
        pipeline: layers are loaded ahead.
    """

    policy: str
    ratio: float
    conditioning: str
    sample: float = 1.0
    pipeline: bool = False
    fresh_tail: int = 0

    @property
    def name(self) -> str:
        ratio = f"@{self.ratio:g}" if create_policy(self.policy).recomputes else ""
        sample = f"~{self.sample:g}" if self.sample < 1 else ""
        pipeline = _PIPELINE if self.pipeline else ""
        tail = f"+tail{self.fresh_tail}" if self.fresh_tail else ""
        return f"{self.policy}{ratio}{sample}{pipeline}:{self.conditioning}{tail}"

    def options(self) -> dict[str, Any]:
        """Of `ask`."""
        return {
            "policy": self.policy,
            "ratio": self.ratio,
            "deviation_sample": self.sample,
            "pipeline": "on" if self.pipeline else "off",
        }


def parse_ttft_arm(text: str) -> TtftArm:
    """An arm by its name, such as `token-topk@0.05` or `document-aligned@0.05~0.25+pipeline:window:3`.

    Raises:
        ConfigError: it is none, or has no place here.
    """
    arm, sample = parse_sampled_arm(text.replace(_PIPELINE, "", 1))
    if arm.policy is None or arm.conditioning is None:
        raise ConfigError(
            f"The arm {text!r} reuses nothing; full prefill is measured beside every arm anyway."
        )
    return TtftArm(
        policy=arm.policy,
        ratio=arm.ratio or 0.0,
        conditioning=arm.conditioning,
        sample=sample,
        pipeline=_PIPELINE in text,
        fresh_tail=arm.fresh_tail,
    )


def parse_ttft_arms(names: Sequence[str]) -> tuple[TtftArm, ...]:
    """Arms by their names, each once."""
    arms = tuple(parse_ttft_arm(name) for name in names)
    twice = next((arm for index, arm in enumerate(arms) if arm in arms[:index]), None)
    if twice is not None:
        raise ConfigError(f"The arm {twice.name!r} is named twice; name each once.")
    return arms
