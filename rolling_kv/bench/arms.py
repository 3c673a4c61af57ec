"""Arms: the ways to answer that measurements compare, as `policy[@ratio][:conditioning][+tail<n>]`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rolling_kv.config import DEFAULT_CONDITIONING, require_ratio, require_sample
from rolling_kv.errors import ConfigError, InvalidRatioError, RollingKVError
from rolling_kv.policies import create_policy
from rolling_kv.window import parse_conditioning

SESSION = "session"
PAPER_RATIO = 0.05
"""What "Request Order Matters" recomputes (section 4.1)."""

_SAMPLE = re.compile(r"~([^:+@]*)")
_TAIL = re.compile(r"\+tail([1-9]\d*)$")
_FORM = (
    "policy[@ratio][:conditioning][+tail<documents>], for example token-topk@0.05:first-seen, "
    "document-aligned:window:3 or direct-reuse:window:8+tail1"
)


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to answer.

    Args:
        policy, ratio, conditioning: of the session; None, all three, for the settings that were recorded with
            a trace, and each request's own.
        fresh_tail: so many of the newest documents are computed in every call.
    """

    policy: str | None
    ratio: float | None = None
    conditioning: str | None = None
    fresh_tail: int = 0

    @property
    def name(self) -> str:
        """In full, so that equal names are equal arms."""
        if self.policy is None:
            return SESSION
        ratio = "" if self.ratio is None else f"@{self.ratio:g}"
        conditioning = "" if self.conditioning is None else f":{self.conditioning}"
        tail = f"+tail{self.fresh_tail}" if self.fresh_tail else ""
        return f"{self.policy}{ratio}{conditioning}{tail}"

    def settings(self) -> dict[str, Any]:
        """Of a session, as far as the arm decides them."""
        if self.policy is None:
            return {}
        conditioning = self.conditioning or DEFAULT_CONDITIONING
        return {
            "policy": self.policy,
            "ratio": 0.0 if self.ratio is None else self.ratio,
            "conditioning": conditioning,
            "fresh_tail": self.fresh_tail,
            "preroll": "off",
            "deterministic": parse_conditioning(conditioning).deterministic,
        }


def parse_arms(names: Sequence[str], *, ratio: float = PAPER_RATIO) -> tuple[Arm, ...]:
    """Arms by their names, each once.

    Raises:
        ConfigError
    """
    arms = tuple(parse_arm(name, ratio=ratio) for name in names)
    if not arms:
        raise ConfigError(f"There is no arm. Expected at least one {_FORM}.")
    for index, arm in enumerate(arms):
        if arm in arms[:index]:
            raise ConfigError(f"The arm {arm.name!r} is named twice; name each once.")
    return arms


def parse_arm(text: str, *, ratio: float = PAPER_RATIO) -> Arm:
    """An arm by its name: `policy[@ratio][:conditioning][+tail<n>]`, `full-prefill`, or `session`.

    Args:
        ratio: where the name says none.

    Raises:
        UnknownPolicyError, UnknownConditioningError, InvalidRatioError, ConfigError
    """
    name = text.strip()
    if name == SESSION:
        return Arm(policy=None)
    try:
        return _parsed(name, ratio=ratio)
    except RollingKVError as error:
        raise type(error)(f"The arm {text!r} is not as expected: {error} An arm is {_FORM}.") from error


def parse_sampled_arm(text: str) -> tuple[Arm, float]:
    """An arm, and the share of each document's tokens whose deviation is computed: `token-topk@0.05~0.25`.

    Raises:
        UnknownPolicyError, UnknownConditioningError, InvalidRatioError, ConfigError
    """
    found = _SAMPLE.search(text)
    arm = parse_arm(_SAMPLE.sub("", text))
    if found is None:
        return arm, 1.0
    try:
        sample = require_sample(float(found[1]))
    except ValueError as error:
        raise ConfigError(f"The arm {text!r} has the sample {found[1]!r}; expected a number.") from error
    needs = create_policy(arm.policy).needs if arm.policy else ()
    if not any(need.signal == "deviation" for need in needs):
        raise ConfigError(f"The arm {text!r} has a sample, and {arm.name} takes no deviations.")
    return arm, sample


def _parsed(name: str, *, ratio: float) -> Arm:
    tail = _TAIL.search(name)
    policy, given, conditioning = _parts(_TAIL.sub("", name))
    made = create_policy(policy)
    if not made.reuses:
        if given is not None or conditioning or tail:
            raise ConfigError(f"{policy} reuses nothing, so it takes no ratio, conditioning or fresh tail.")
        return Arm(policy=policy)
    if given is not None and not made.recomputes:
        raise ConfigError(f"{policy} recomputes nothing, so it takes no ratio.")
    mode = parse_conditioning(conditioning or DEFAULT_CONDITIONING)
    if mode.fused != "never" and any(need.signal == "anchors" for need in made.needs):
        raise ConfigError(f"{policy} needs anchors, and conditioning {mode.name!r} keeps none.")
    share = _ratio(given) if given is not None else require_ratio(ratio)
    return Arm(
        policy=policy,
        ratio=share if made.recomputes else None,
        conditioning=mode.name,
        fresh_tail=int(tail[1]) if tail else 0,
    )


def _parts(name: str) -> tuple[str, str | None, str]:
    """Policy, ratio and conditioning; a wrapper's policy holds a colon as well."""
    policy, at, rest = name.partition("@")
    if at:
        share, _, conditioning = rest.partition(":")
        return policy, share, conditioning
    policy, _, conditioning = name.partition(":")
    if policy == "sink-repair" and conditioning:
        inner, _, rest = conditioning.partition(":")
        try:
            create_policy(f"{policy}:{inner}")
        except ConfigError:
            return policy, None, conditioning
        return f"{policy}:{inner}", None, rest
    return policy, None, conditioning


def _ratio(text: str) -> float:
    try:
        return require_ratio(float(text))
    except ValueError as error:
        raise InvalidRatioError(f"its ratio is {text!r}; expected a number from 0 to 1.") from error
