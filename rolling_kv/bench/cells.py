"""Cells of the frontier: how stored KV is made, and which of it is recomputed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rolling_kv.bench.arms import parse_sampled_arm
from rolling_kv.bench.fidelity import Arm
from rolling_kv.errors import ConfigError
from rolling_kv.policies import create_policy
from rolling_kv.window import parse_eviction

_EXPECTED = (
    "expected <policy>@<ratio>:<conditioning>, such as qcfuse-spans@0.1:isolated. Behind it: +packed "
    "for packed positions, +tail1 for a fresh tail of one document, +idle for slides in idle time, "
    "+layer6 for selection there. Behind the ratio: ~0.25 for deviations of a sample. Or "
    "batch:<documents>, or preroll"
)
_MARK = re.compile(r"(?P<kind>packed|idle|(?:tail|layer)(?=[1-9]\d*$))(?P<number>(?<!packed)(?<!idle)\d+)?")


@dataclass(frozen=True, slots=True)
class Setting:
    """How the KV of a window is made.

    Args:
        positions, fresh_tail: as in `SessionSettings`.
        anchors: whether they are kept beside it.
        batch: documents evicted at once, under full conditioning; 0: one by one.
        preroll: what is computed before every slide, as in `SessionSettings`.
    """

    conditioning: str
    positions: str = "true"
    fresh_tail: int = 0
    anchors: bool = False
    batch: int = 0
    preroll: Literal["off", "slide", "wait"] = "off"

    @property
    def name(self) -> str:
        if self.exact:
            return f"batch:{self.batch}" if self.batch else "preroll"
        packed = "+packed" if self.positions == "packed" else ""
        tail = f"+tail{self.fresh_tail}" if self.fresh_tail else ""
        idle = "+idle" if self.preroll == "slide" else ""
        return f"{self.conditioning}{packed}{tail}{idle}"

    @property
    def exact(self) -> bool:
        """Whether every answer is full prefill's."""
        return bool(self.batch) or self.preroll == "wait"

    def session_settings(self, *, documents: int) -> dict[str, Any]:
        """Of a session that keeps a window of so many documents.

        Where documents are evicted one by one the session has no bound of its own, so that a slide and an
        append can be told apart.
        """
        settings = {
            "conditioning": self.conditioning,
            "positions": self.positions,
            "fresh_tail": self.fresh_tail,
            "policy": "qcfuse" if self.anchors else "direct-reuse",
        }
        if self.batch:
            settings |= {"window": documents, "eviction": f"batch:{self.batch}"}
        elif self.preroll != "off":
            settings |= {"window": documents, "preroll": self.preroll}
        return settings


@dataclass(frozen=True, slots=True)
class Cell:
    """A setting, and an arm that answers over it."""

    setting: Setting
    arm: Arm

    @property
    def name(self) -> str:
        if self.setting.exact:
            return self.setting.name
        share = f"@{self.arm.ratio:g}" if create_policy(self.arm.policy).recomputes else ""
        share += f"~{self.arm.deviation_sample:g}" if self.arm.deviation_sample < 1 else ""
        layer = "" if self.arm.selection_layer == 1 else f"+layer{self.arm.selection_layer}"
        return f"{self.arm.policy}{share}:{self.setting.name}{layer}"


def parse_cell(text: str) -> Cell:
    """`qcfuse-spans@0.1:window:3+packed`, `batch:8` or `preroll` as a cell.

    Raises:
        ConfigError, UnknownPolicyError, UnknownConditioningError, InvalidRatioError
    """
    nothing = Arm("direct-reuse", 0.0)
    if text == "preroll":
        return Cell(Setting("isolated", preroll="wait"), nothing)
    if text.startswith("batch:"):
        return Cell(Setting("full", batch=parse_eviction(text)), nothing)
    base, *marks = text.split("+")
    found = [_MARK.fullmatch(mark) for mark in marks]
    given = {match["kind"]: int(match["number"] or 0) for match in found if match}
    if len(given) != len(marks):
        raise ConfigError(f"The cell is {text!r}; {_EXPECTED}.")
    arm, sample = parse_sampled_arm(base)
    if arm.policy is None or arm.conditioning is None:
        raise ConfigError(f"The cell is {text!r}, and every cell is compared with full prefill; {_EXPECTED}.")
    needs = create_policy(arm.policy).needs
    setting = Setting(
        arm.conditioning,
        positions="packed" if "packed" in given else "true",
        fresh_tail=given.get("tail", 0),
        preroll="slide" if "idle" in given else "off",
        anchors=any(need.signal == "anchors" for need in needs),
    )
    return Cell(setting, Arm(arm.policy, arm.ratio or 0.0, given.get("layer", 1), sample))


def grid(*, conditionings: Sequence[str], policies: Sequence[str], ratios: Sequence[float]) -> list[Cell]:
    """Every policy at every ratio under every conditioning, as these are written in cells."""
    cells = []
    for conditioning in conditionings:
        for policy in policies:
            shares = [f"@{ratio:g}" for ratio in ratios] if create_policy(policy).recomputes else [""]
            cells += [parse_cell(f"{policy}{share}:{conditioning}") for share in shares]
    return list(dict.fromkeys(cells))
