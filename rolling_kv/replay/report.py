"""What a replay found, as JSON, a page, plots and a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rolling_kv.bench.statistics import Share, share_of
from rolling_kv.errors import ConfigError
from rolling_kv.replay.metrics import ArmFigures, Comparison, comparisons_of, figures_of
from rolling_kv.replay.parting import TIE_TOLERANCE
from rolling_kv.replay.rows import ReferenceRow, ReplayRow
from rolling_kv.replay.runs import CONTROLS, Runs, runs_of
from rolling_kv.replay.table import details, notes, table

__all__ = ["ReplayReport", "details", "notes", "summarise", "table", "write_report"]


@dataclass(frozen=True)
class ReplayReport:
    """The figures of a replay.

    Args:
        runs: what they come from.
        arms: in the order of the rows.
        comparisons: of every two arms in every order.
        settings: what was run, as the report shows it; plain values.
        tie_tolerance: logits; see `Parting`.
    """

    runs: Runs
    arms: tuple[ArmFigures, ...]
    comparisons: tuple[Comparison, ...]
    settings: dict[str, Any]
    tie_tolerance: float

    def arm(self, name: str) -> ArmFigures:
        """The figures of one arm.

        Raises:
            ConfigError: there is none of that name.
        """
        found = next((arm for arm in self.arms if arm.arm == name), None)
        if found is None:
            known = ", ".join(arm.arm for arm in self.arms)
            raise ConfigError(f"No arm {name!r} was replayed. Replayed ones: {known}.")
        return found

    def variation(self, arm: str) -> Share:
        """The share of pairs of orders whose answers differ, over all requests.

        Raises:
            ConfigError: the arm was replayed in fewer than two orders.
        """
        found = self.arm(arm).variation
        if found is None:
            raise ConfigError(
                f"Arm {arm!r} was replayed in fewer than two orders, which shows no variation. Replay it in "
                "at least two, controls not counted."
            )
        return found

    def fidelity(self, arm: str, order: str) -> Share:
        """The share of requests whose answer is full prefill's; `order` may be the control `reset`, or `all`.

        Raises:
            ConfigError: the arm was not replayed in that order.
        """
        figures = self.arm(arm)
        known = [*figures.orders, *([] if figures.reset is None else [figures.reset]), figures.total]
        found = next((one for one in known if one.order == order), None)
        if found is None:
            names = ", ".join(one.order for one in known)
            raise ConfigError(f"Arm {arm!r} has no fidelity for order {order!r}. Expected one of {names}.")
        return found.fidelity

    @property
    def right(self) -> Share | None:
        """How often full prefill itself gave the expected answer; None where no request says what that is."""
        known = [row.right for row in self.runs.references.values() if row.right is not None]
        return share_of(known) if known else None

    @property
    def crowd(self) -> str | None:
        """What to know of the times when several processes replayed beside each other."""
        workers = self.settings.get("workers", {})
        count, threads = workers.get("processes", 1), workers.get("threads", 1)
        if count == 1:
            return None
        each = "1 thread" if threads == 1 else f"{threads} threads"
        return (
            f"Up to {count} processes replayed at once, with {each} each: "
            "times to the first token are those of a machine so busy."
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "settings": self.settings,
            "requests": len(self.runs.references),
            "orders": list(self.runs.all_orders()),
            "controls": [name for name in CONTROLS if any(name in held for held in self.runs.arms.values())],
            "tie_tolerance": self.tie_tolerance,
            "full_prefill_right": None if self.right is None else asdict(self.right),
            "arms": {arm.arm: arm.to_dict() for arm in self.arms},
            "comparisons": [asdict(one) for one in self.comparisons],
        }


def summarise(
    references: Sequence[ReferenceRow],
    rows: Sequence[ReplayRow],
    *,
    settings: dict[str, Any] | None = None,
    tie_tolerance: float = TIE_TOLERANCE,
) -> ReplayReport:
    """All figures of a replay.

    Args:
        settings: what was run, for the report; plain values.
        tie_tolerance: logits; answers that part where both margins are below it are called a tie.

    Raises:
        BenchError: rows are missing, double, or of another prompt than their reference.
        MissingExtraError: scipy is not installed.
    """
    runs = runs_of(references, rows)
    return ReplayReport(
        runs=runs,
        arms=tuple(figures_of(runs, arm, tolerance=tie_tolerance) for arm in runs.arms),
        comparisons=comparisons_of(runs),
        settings=settings or {},
        tie_tolerance=tie_tolerance,
    )


def write_report(report: ReplayReport, out: Path) -> None:
    """Writes report.json, report.html (one file, which needs nothing else) and the plots as PNG files.

    Args:
        out: a folder, made when missing.

    Raises:
        MissingExtraError: matplotlib or jinja2 is not installed.
    """
    from rolling_kv.replay.page import page
    from rolling_kv.replay.plots import PLOTS, save

    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")
    html = page(report)  # a lone surrogate in an answer is no character that a file could hold
    (out / "report.html").write_text(html, encoding="utf-8", errors="backslashreplace")
    for name in PLOTS:
        save(name, report, out / f"{name}.png")
