"""Plots of a replay."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rolling_kv.bench.plots import require_plots, subplots
from rolling_kv.replay.groups import groups_by_order

if TYPE_CHECKING:
    from rolling_kv.bench.statistics import Share
    from rolling_kv.replay.report import ReplayReport

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GROUP_COLOURS = ("#d9ead3", "#D55E00", "#0072B2", "#E69F00", "#CC79A7", "#56B4E9", "#000000")
_NOT_RUN = "#ffffff"


def variation(report: ReplayReport) -> Any:
    """A bar an arm: the share of pairs of orders whose answers differ."""
    known = [(arm.arm, arm.variation) for arm in report.arms if arm.variation is not None]
    figure, axes = subplots(1, 1, width=7.2, height=1.3 + 0.5 * max(1, len(known)))
    panel = axes[0, 0]
    names = [name for name, _ in known]
    for index, (name, share) in enumerate(known):
        colour = _colour(report, name)
        panel.barh(index, share.share, color=colour, alpha=0.75, height=0.6)
        panel.errorbar(
            share.share, index, xerr=[[s] for s in _errors(share)], color="black", capsize=3, linewidth=1
        )
        panel.text(share.high + 0.015, index, f"{share.share:.1%}", va="center", fontsize=9)
    panel.set_yticks(range(len(names)), names, fontsize=9)
    panel.invert_yaxis()
    panel.set_xlim(0, 1.12)
    panel.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
    panel.set_xlabel("pairs of orders whose answers differ (95% interval)")
    _plain(panel, grid="x")
    return figure


def fidelity(report: ReplayReport) -> Any:
    """Points by order, a colour an arm: the share of answers equal to full prefill's; reset stands apart."""
    orders = list(report.runs.all_orders())
    reset = any(arm.reset is not None for arm in report.arms)
    places = {order: float(index) for index, order in enumerate(orders)}
    if reset:
        places["reset"] = len(orders) + 0.3
    figure, axes = subplots(1, 1, width=max(6.0, 1.5 * len(places) + 1), height=4.2)
    panel = axes[0, 0]
    step = min(0.16, 0.7 / len(report.arms))
    for index, arm in enumerate(report.arms):
        shown = [*arm.orders, *([] if arm.reset is None else [arm.reset])]
        shift = (index - (len(report.arms) - 1) / 2) * step
        panel.errorbar(
            [places[one.order] + shift for one in shown],
            [one.fidelity.share for one in shown],
            yerr=list(zip(*(_errors(one.fidelity) for one in shown), strict=True)),
            fmt="osD^v<>"[index % 7],
            color=_colour(report, arm.arm),
            markersize=5,
            capsize=2,
            linewidth=1,
            label=arm.arm,
        )
    if reset:
        panel.axvline(len(orders) - 0.35, color="gray", linewidth=0.8, linestyle=":")
    panel.set_xticks(
        list(places.values()), [*orders, *(["store reset\n(control)"] if reset else [])], fontsize=9
    )
    panel.set_ylim(-0.03, 1.03)
    panel.set_ylabel("answers equal to full prefill's")
    _plain(panel, grid="y")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def answers(report: ReplayReport) -> Any:
    """A panel an arm, a line a request, a column an order: which answers are the same."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    requests, orders = list(report.runs.references), list(report.runs.all_orders())
    figure, axes = subplots(
        1,
        len(report.arms),
        width=max(2.0, 0.45 * len(orders) + 1),
        height=min(14.0, 2.4 + 0.13 * len(requests)),
    )
    colours = ListedColormap((_NOT_RUN, *GROUP_COLOURS))
    for panel, arm in zip(axes.flat, report.arms, strict=True):
        found = [groups_by_order(report.runs, arm.arm, request) for request in requests]
        cells = [
            [min(by_order.get(order, -1), len(GROUP_COLOURS) - 1) + 1 for order in orders]
            for by_order in found
        ]
        panel.imshow(
            cells, cmap=colours, vmin=0, vmax=len(GROUP_COLOURS), aspect="auto", interpolation="nearest"
        )
        panel.set_title(arm.arm.replace(":", ":\n", 1), fontsize=8)
        panel.set_xticks(range(len(orders)), orders, rotation=60, ha="right", fontsize=7)
        panel.yaxis.get_major_locator().set_params(integer=True)
        panel.tick_params(labelsize=7)
        if len(requests) <= 100:
            panel.set_xticks([x - 0.5 for x in range(1, len(orders))], minor=True)
            panel.set_yticks([y - 0.5 for y in range(1, len(requests))], minor=True)
            panel.grid(which="minor", color="white", linewidth=1)
            panel.tick_params(which="minor", length=0)
    axes[0, 0].set_ylabel("request", fontsize=8)
    names = (
        "full prefill's answer",
        "another answer",
        "a second other",
        "a third",
        "a fourth",
        "a fifth",
        "more",
    )
    most = max(max(one.values(), default=0) for one in _all_groups(report))
    handles = [
        Patch(facecolor=colour, label=name)
        for colour, name in list(zip(GROUP_COLOURS, names, strict=True))[: most + 1]
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def ttft(report: ReplayReport) -> Any:
    """Boxes of the time to first token: full prefill's, and every arm's over all orders."""
    samples = {"full prefill (reference)": [one.ttft for one in report.runs.references.values()]}
    samples |= {arm.arm: [row.ttft for row in report.runs.rows(arm.arm)] for arm in report.arms}
    figure, axes = subplots(1, 1, width=7.2, height=1.3 + 0.45 * len(samples))
    panel = axes[0, 0]
    boxes = panel.boxplot(
        list(samples.values()),
        orientation="horizontal",
        widths=0.6,
        patch_artist=True,
        whis=(5, 95),
        flierprops={"markersize": 2, "alpha": 0.5},
        medianprops={"color": "black"},
    )
    for box, name in zip(boxes["boxes"], samples, strict=True):
        box.set(facecolor=_colour(report, name), alpha=0.6)
    panel.set_yticks(range(1, len(samples) + 1), list(samples), fontsize=9)
    panel.invert_yaxis()
    panel.set_xlim(left=0)
    panel.set_xlabel("seconds to the first token (box: quartiles, whiskers: 5% to 95%)")
    _plain(panel, grid="x")
    return figure


PLOTS: dict[str, Callable[[ReplayReport], Any]] = {
    "variation": variation,
    "fidelity": fidelity,
    "answers": answers,
    "ttft": ttft,
}


def save(name: str, report: ReplayReport, target: Path | IO[bytes], *, format: str = "png") -> None:
    """Draws one of `PLOTS`; the same report gives the same bytes."""
    require_plots()
    import matplotlib

    # Names of arms and orders are a user's: a dollar sign in one is no formula.
    with matplotlib.rc_context({"text.parse_math": False, "svg.hashsalt": "rolling-kv"}):
        figure = PLOTS[name](report)
        metadata = {"Date": None} if format == "svg" else None
        figure.savefig(target, dpi=130, format=format, metadata=metadata)


def inline(name: str, report: ReplayReport) -> str:
    """One of `PLOTS` as the source of an image that is part of the page."""
    drawn = io.BytesIO()
    save(name, report, drawn, format="svg")
    return "data:image/svg+xml;base64," + base64.b64encode(drawn.getvalue()).decode()


def _all_groups(report: ReplayReport) -> Iterator[dict[str, int]]:
    return (
        groups_by_order(report.runs, arm.arm, request)
        for arm in report.arms
        for request in report.runs.references
    )


def _colour(report: ReplayReport, name: str) -> str:
    names = [arm.arm for arm in report.arms]
    return COLOURS[names.index(name) % len(COLOURS)] if name in names else "#999999"


def _errors(share: Share) -> tuple[float, float]:
    return max(0.0, share.share - share.low), max(0.0, share.high - share.share)


def _plain(panel: Any, *, grid: str) -> None:
    panel.grid(axis=grid, alpha=0.3)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
