"""What the rows of a frontier run say: one entry a cell, the best of them, and a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from rolling_kv.bench.statistics import share_of


def measured(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those whose cells were measured; past the others the window rolled."""
    return [row for row in rows if row["measured"]]


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry a cell; shares of computation are means, those of rolling over all windows."""
    taken = measured(rows)
    entries = []
    for place, setting in enumerate(taken[0]["settings"]):
        rolled = [row["rolled"][place] for row in rows if "rolled" in row]
        work = {part: fmean(one[part] for one in rolled) for part in ("idle", "append", "slide")}
        entries += [_entry(taken, place, cell, work) for cell in setting["cells"]]
    return entries


def _entry(
    rows: Sequence[dict[str, Any]], place: int, name: str, rolling: dict[str, float]
) -> dict[str, Any]:
    own = [row["settings"][place] for row in rows]
    cells = [one["cells"][name] for one in own]
    right = [cell["agrees"] for cell, row in zip(cells, rows, strict=True) if row["full_prefill"]["right"]]
    work = rolling | {"ask": fmean(cell["ask"] for cell in cells)}
    return {
        "cell": name,
        "setting": own[0]["setting"],
        "policy": cells[0]["policy"],
        "ratio": cells[0]["ratio"],
        "requests": len(rows),
        "answer_agreement": asdict(share_of([cell["agrees"] for cell in cells])),
        "agreement_where_right": asdict(share_of(right)) if right else None,
        "top1": fmean(cell["top1"] for cell in cells),
        "kl": fmean(cell["kl"] for cell in cells),
        "work": work | {"slide_and_ask": work["slide"] + work["ask"]},
        "ttft_seconds": median(cell["ttft"] for cell in cells),
        "speedup": median(one["full_ttft"] / cell["ttft"] for one, cell in zip(own, cells, strict=True)),
        "degraded": sorted({reason for cell in cells for reason in cell["degraded"]}),
    }


def best(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cells that no other beats: none agrees as often for as little computation at slide and ask."""

    def beats(one: dict[str, Any], other: dict[str, Any]) -> bool:
        more = one["answer_agreement"]["share"] - other["answer_agreement"]["share"]
        less = other["work"]["slide_and_ask"] - one["work"]["slide_and_ask"]
        return bool(more >= 0 and less >= 0 and (more > 0 or less > 0))

    return [entry for entry in entries if not any(beats(other, entry) for other in entries)]


def markdown(entries: Sequence[dict[str, Any]]) -> str:
    """A table of the cells, those that agree most often first."""
    lines = [
        "| cell | equal to full prefill (95%) | top-1 | KL | idle | append | slide | ask | sooner |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    unbeaten = [entry["cell"] for entry in best(entries)]
    for entry in sorted(entries, key=lambda entry: -entry["answer_agreement"]["share"]):
        agreement, work = entry["answer_agreement"], entry["work"]
        name = f"**`{entry['cell']}`**" if entry["cell"] in unbeaten else f"`{entry['cell']}`"
        shares = " | ".join(f"{100 * work[part]:.1f}%" for part in ("idle", "append", "slide", "ask"))
        lines.append(
            f"| {name} | {agreement['share']:.2f} ({agreement['low']:.2f} to {agreement['high']:.2f}) | "
            f"{entry['top1']:.2f} | {entry['kl']:.3f} | {shares} | {entry['speedup']:.1f}x |"
        )
    return "\n".join(lines)
