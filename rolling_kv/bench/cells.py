"""Cells of the frontier: how stored KV is made, and which of it is recomputed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rolling_kv.bench.fidelity import Arm
from rolling_kv.config import require_ratio
from rolling_kv.errors import ConfigError
from rolling_kv.policies import create_policy
from rolling_kv.window import parse_conditioning, parse_eviction

_CELL = re.compile(
    r"(?P<policy>(?:sink-repair:)?[a-z-]+)(?:@(?P<ratio>\d*\.?\d+(?:e-\d+)?))?:(?P<conditioning>[a-z-]+(?::\d+)?)"
    r"(?P<marks>(?:\+[a-z]+\d*)*)"
)
_EXPECTED = (
    "expected <policy>@<ratio>:<conditioning>, such as qcfuse-spans@0.1:isolated, with +packed or +tail1 "
    "behind it for packed positions or a fresh tail of one document; or batch:<documents>, or preroll"
)


@dataclass(frozen=True, slots=True)
class Setting:
    """How the KV of a window is made.

    Args:
        positions, fresh_tail: as in `SessionSettings`.
        anchors: whether they are kept beside it.
        batch: documents evicted at once, under full conditioning; 0: one by one.
        preroll: the next window is prefilled exactly before every slide.
    """

    conditioning: str
    positions: str = "true"
    fresh_tail: int = 0
    anchors: bool = False
    batch: int = 0
    preroll: bool = False

    @property
    def name(self) -> str:
        if self.batch or self.preroll:
            return f"batch:{self.batch}" if self.batch else "preroll"
        packed = "+packed" if self.positions == "packed" else ""
        tail = f"+tail{self.fresh_tail}" if self.fresh_tail else ""
        return f"{self.conditioning}{packed}{tail}"

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
        elif self.preroll:
            settings |= {"window": documents, "preroll": "wait"}
        return settings


@dataclass(frozen=True, slots=True)
class Cell:
    """A setting, and an arm that answers over it."""

    setting: Setting
    arm: Arm

    @property
    def name(self) -> str:
        if self.setting.batch or self.setting.preroll:
            return self.setting.name
        return f"{self.arm.policy}@{self.arm.ratio:g}:{self.setting.name}"


def parse_cell(text: str) -> Cell:
    """`qcfuse-spans@0.1:window:3+packed`, `batch:8` or `preroll` as a cell.

    Raises:
        ConfigError, UnknownPolicyError, UnknownConditioningError, InvalidRatioError
    """
    nothing = Arm("direct-reuse", 0.0)
    if text == "preroll":
        return Cell(Setting("isolated", preroll=True), nothing)
    if text.startswith("batch:"):
        return Cell(Setting("full", batch=parse_eviction(text)), nothing)
    match = _CELL.fullmatch(text)
    if match is None:
        raise ConfigError(f"The cell is {text!r}; {_EXPECTED}.")
    marks = match["marks"].split("+")[1:]
    tails = [int(mark[4:]) for mark in marks if re.fullmatch(r"tail[1-9]\d*", mark)]
    if len(tails) + marks.count("packed") != len(marks) or len(tails) > 1 or marks.count("packed") > 1:
        raise ConfigError(f"The cell is {text!r}; {_EXPECTED}.")
    policy = create_policy(match["policy"])
    if not policy.reuses:
        raise ConfigError(f"The cell is {text!r}; full prefill is what every cell is compared with.")
    if policy.recomputes and match["ratio"] is None:
        raise ConfigError(f"The cell is {text!r}, without a ratio; {_EXPECTED}.")
    ratio = require_ratio(float(match["ratio"])) if policy.recomputes else 0.0
    return _cell(
        match["policy"],
        ratio,
        conditioning=parse_conditioning(match["conditioning"]).name,
        positions="packed" if "packed" in marks else "true",
        fresh_tail=sum(tails),
    )


def grid(*, conditionings: Sequence[str], policies: Sequence[str], ratios: Sequence[float]) -> list[Cell]:
    """Every policy at every ratio under every conditioning, with or without `+packed` and `+tail1` behind."""
    cells = []
    for conditioning in conditionings:
        for policy in policies:
            own = ratios if create_policy(policy).recomputes else (0.0,)
            cells += [parse_cell(f"{policy}@{ratio:g}:{conditioning}") for ratio in own]
    return list(dict.fromkeys(cells))


def _cell(policy: str, ratio: float, *, conditioning: str, positions: str, fresh_tail: int) -> Cell:
    needs = create_policy(policy).needs
    setting = Setting(
        conditioning,
        positions=positions,
        fresh_tail=fresh_tail,
        anchors=any(need.signal == "anchors" for need in needs),
    )
    return Cell(setting, Arm(policy, ratio))
