"""Plots, as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rolling_kv.errors import MissingExtraError

_MARKERS = "os^vDP*X<>"


def quality_against_ttft(entries: Sequence[dict[str, Any]], path: Path, *, title: str) -> None:
    """A panel a workload: answer agreement over TTFT, a line a policy over its ratios (QCFuse, figure 10)."""
    workloads = list(dict.fromkeys(entry["workload"] for entry in entries))
    columns = min(3, len(workloads))
    lines = -(-len(workloads) // columns)
    figure, axes = subplots(lines, columns, width=5.2 + 2.4 / columns, height=4.2)
    policies = list(dict.fromkeys(entry["policy"] for entry in entries))
    for panel, workload in zip(axes.flat, workloads, strict=False):
        for index, policy in enumerate(policies):
            own = [e for e in entries if e["workload"] == workload and e["policy"] == policy]
            panel.plot(
                [1 / entry["speedup"] for entry in own],
                [entry["answer_agreement"]["share"] for entry in own],
                marker="os^vD*"[index % 6],
                color=f"C{index % 10}",
                linestyle="-" if index < 10 else "--",
                markersize=5,
                linewidth=1,
                label=policy,
            )
        panel.scatter([1], [1], marker="*", color="black", zorder=3, label="full-prefill")
        panel.set_title(f"{workload}, {own[0]['requests']} requests", fontsize=9)
        panel.set_xlabel("time to first token, full prefill = 1")
        panel.set_ylabel("answers equal to full prefill's")
        panel.set_ylim(-0.03, 1.03)
        panel.grid(alpha=0.3)
    for panel in axes.flat[len(workloads) :]:
        panel.set_axis_off()
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)


def quality_against_work(entries: Sequence[dict[str, Any]], path: Path, *, title: str) -> None:
    """Answer agreement, and KL below it, over computation: a colour a setting, a marker a policy.

    On the left what slide and ask take, on the right what append and idle time take beside it. Cells that no
    other beats at slide and ask are joined by a line.
    """
    from rolling_kv.bench.frontier_report import best

    figure, axes = subplots(2, 2, width=6.6, height=4.4)
    settings = list(dict.fromkeys(entry["setting"] for entry in entries))
    policies = list(dict.fromkeys(entry["policy"] for entry in entries))
    colours = _colours(len(settings))
    least = min((entry["kl"] for entry in entries if entry["kl"] > 1e-6), default=1e-6)

    def work(entry: dict[str, Any], parts: Sequence[str]) -> float:
        return 100 * sum(float(entry["work"][part]) for part in parts)

    for column, parts in enumerate((("slide", "ask"), ("idle", "append", "slide", "ask"))):
        above, below = axes[:, column]
        for entry in entries:
            agreement = entry["answer_agreement"]
            look = {
                "color": colours[settings.index(entry["setting"])],
                "marker": _MARKERS[policies.index(entry["policy"]) % len(_MARKERS)],
                "markersize": 7,
                "alpha": 0.75,
            }
            above.errorbar(
                work(entry, parts),
                agreement["share"],
                yerr=[[agreement["share"] - agreement["low"]], [agreement["high"] - agreement["share"]]],
                elinewidth=0.5,
                **look,
            )
            below.plot([work(entry, parts)], [max(entry["kl"], least / 2)], **look)
        above.axhline(0.95, color="gray", linestyle=":", linewidth=0.8)
        above.set(ylim=(-0.03, 1.03))
        below.set(yscale="log", xlabel=f"computation at {', '.join(parts)}, % of full prefill's")
        for panel in (above, below):
            panel.set_xlim(left=0)
            panel.grid(alpha=0.3)
    front = sorted(best(entries), key=lambda entry: work(entry, ("slide", "ask")))
    first = axes[0, 0]
    first.plot(
        [work(entry, ("slide", "ask")) for entry in front],
        [entry["answer_agreement"]["share"] for entry in front],
        color="black",
        linewidth=0.8,
        zorder=0,
    )
    for panel in axes[:, 0]:
        panel.axvline(10, color="gray", linestyle=":", linewidth=0.8)
    first.set_ylabel("answers equal to full prefill's (95% interval)")
    axes[1, 0].set_ylabel(f"mean KL to full prefill, nats (below {least:.1g}: drawn at the foot)")
    for colour, setting in zip(colours, settings, strict=True):
        first.plot([], [], color=colour, linewidth=4, label=setting)
    for index, policy in enumerate(policies):
        marker = _MARKERS[index % len(_MARKERS)]
        first.plot([], [], color="gray", marker=marker, linestyle="", label=policy)
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)


def _colours(count: int) -> list[Any]:
    """Colours that can be told apart."""
    from matplotlib import colormaps

    return [colormaps["tab20"](index % 20) for index in range(count)]


def curves(
    panels: Sequence[tuple[str, str, str, dict[str, tuple[Sequence[Any], Sequence[float]]]]],
    path: Path,
    *,
    title: str,
) -> None:
    """Line plots side by side.

    Args:
        panels: each a title, the names of its axes, and its lines: label to (x, y).
    """
    figure, axes = subplots(1, len(panels), width=4.6, height=3.8)
    for panel, (name, x_name, y_name, lines) in zip(axes.flat, panels, strict=True):
        for label, (x, y) in lines.items():
            if len(x) == 1:
                panel.axhline(y[0], linestyle="--", color="gray", label=label)
            else:
                panel.plot(x, y, marker="o", markersize=3, linewidth=1, label=label)
        panel.set(title=name, xlabel=x_name, ylabel=y_name, ylim=(-0.03, 1.03))
        if all(isinstance(value, int) for x, _ in lines.values() for value in x):
            panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)


def ttft_against_window(entries: Sequence[dict[str, Any]], path: Path, *, title: str) -> None:
    """A line a side: the median time to first token over the tokens of the prompt, both axes logarithmic."""
    figure, axes = subplots(1, 1, width=7.5, height=5.2)
    panel = axes.flat[0]
    for index, side in enumerate(dict.fromkeys(entry["side"] for entry in entries)):
        own = [entry for entry in entries if entry["side"] == side]
        medians = [entry["ttft"]["median"] for entry in own]
        spread = [
            [one - min(entry["ttft"]["all"]) for one, entry in zip(medians, own, strict=True)],
            [max(entry["ttft"]["all"]) - one for one, entry in zip(medians, own, strict=True)],
        ]
        panel.errorbar(
            [entry["prompt_tokens"] for entry in own],
            medians,
            yerr=spread,
            marker="os^vD*"[index % 6],
            color="black" if side == "full-prefill" else f"C{index % 10}",
            linestyle="-" if index < 10 else "--",
            markersize=4,
            linewidth=1,
            capsize=2,
            label=side,
        )
    panel.set(
        xscale="log", yscale="log", xlabel="tokens of the prompt", ylabel="time to first token, seconds"
    )
    panel.grid(alpha=0.3, which="both")
    figure.legend(loc="outside lower center", ncols=2, fontsize=7)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)


def require_plots() -> None:
    """Fails early where plots cannot be made.

    Raises:
        MissingExtraError
    """
    try:
        import matplotlib  # noqa: F401  # only whether it is there
    except ImportError as error:
        raise MissingExtraError(
            "Plots need matplotlib, which is not installed. Run: pip install 'rolling-kv[bench]'"
        ) from error


def subplots(lines: int, columns: int, *, width: float, height: float) -> tuple[Any, Any]:
    """A figure and its axes, [lines, columns], of so many inches a panel.

    Raises:
        MissingExtraError
    """
    require_plots()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * lines), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(lines, columns, squeeze=False)
