"""What the rows of `rolling-kv bench ttft` say."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from rolling_kv.bench.ttft import FULL, LLAMA_CPP, PHASES


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry a window and side: full prefill, every arm in every setup, and llama.cpp if it took part.

    Ratios are full prefill's time over the side's in the same request; the first request warms up and counts
    for memory and multiplications alone.
    """
    entries = []
    for window in dict.fromkeys(row["window"] for row in rows):
        own = [row for row in rows if row["window"] == window]
        timed = [row for row in own if row["request"]]
        sides = dict.fromkeys(name for row in timed for name in row["measured"])
        first = own[0]["measured"] if not own[0]["request"] else {}
        order = sorted(sides, key=lambda name: name != FULL)
        entries += [_entry(window, name, timed, first) for name in order]
    return entries


def _entry(
    window: int, side: str, rows: Sequence[dict[str, Any]], first: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """What the requests of a window say of one side.

    Args:
        first: what was measured in the request that warms up.
    """
    pairs = [(row["measured"][FULL], row["measured"][side]) for row in rows if side in row["measured"]]
    times = [one["ttft"] for _, one in pairs]
    ratios = [full["ttft"] / one["ttft"] for full, one in pairs]
    last = pairs[-1][1]
    entry = {
        "window": window,
        "side": side,
        "arm": last.get("arm", side),
        "setup": last.get("setup"),
        "requests": len(pairs),
        "prompt_tokens": median(one["prompt_tokens"] for _, one in pairs),
        "ttft": {"median": median(times), "p95": percentile(times, 0.95), "all": times},
        "sooner": {"median": median(ratios), "lowest": min(ratios), "highest": max(ratios)},
    }
    if side == LLAMA_CPP:
        return entry
    return entry | {
        "phases": {phase: median(one["phases"][phase] for _, one in pairs) for phase in PHASES},
        "append": None if side == FULL else median(one["append_seconds"] for _, one in pairs),
        "idle": None if side == FULL else median(one.get("idle_seconds", 0.0) for _, one in pairs),
        "kv_bytes_moved": median(one["kv_bytes_moved"] for _, one in pairs),
        "recomputed": median(one["recomputed"] for _, one in pairs),
        "segments": median(one["segments"] for _, one in pairs),
        "same_first_token": sum(full["first_token"] == one["first_token"] for full, one in pairs),
        "memory": first.get(side, {}).get("memory"),
        "fewer_multiplications": _fewer(first, side),
        "degraded": sorted({reason for _, one in pairs for reason in one["degraded"]}),
    }


def _fewer(first: dict[str, dict[str, Any]], side: str) -> float | None:
    """Full prefill's multiplications over the side's: as many times sooner as arithmetic alone allows."""
    full, own = (first.get(name, {}).get("multiplications") for name in (FULL, side))
    return full / own if full and own else None


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that `share` of them do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def loading(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How fast a window is loaded from a folder, verified, beside numpy that reads and sums the files."""
    found = []
    for window in dict.fromkeys(row["window"] for row in rows):
        own = [one for row in rows if row["window"] == window and row["request"] for one in row["loading"]]
        if own:
            found.append(
                {
                    "window": window,
                    "requests": len(own),
                    "bytes": median(one["bytes"] for one in own),
                    "bytes_per_second": median(one["bytes"] / one["seconds"] for one in own),
                    "memmap_bytes_per_second": median(one["bytes"] / one["memmap_seconds"] for one in own),
                    "share": median(one["memmap_seconds"] / one["seconds"] for one in own),
                }
            )
    return found


def markdown(entries: Sequence[dict[str, Any]]) -> str:
    """A table a window; times in seconds."""
    lines = []
    for window in dict.fromkeys(entry["window"] for entry in entries):
        own = [entry for entry in entries if entry["window"] == window]
        lines += [
            f"### {window} documents, {own[0]['prompt_tokens']:.0f} tokens, {own[0]['requests']} requests",
            "",
            "| arm | setup | TTFT, median (P95) | sooner (range) | fewer multiplications | ingest | load | "
            "select | fuse | append | idle |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
            *(_line(entry) for entry in own),
            "",
        ]
    return "\n".join(lines)


def _line(entry: dict[str, Any]) -> str:
    phases = entry.get("phases", {})
    cells = [f"{phases[name]:.3f}" if phases else "" for name in ("ingest", "load", "select", "fuse")]
    append, fewer = entry.get("append"), entry.get("fewer_multiplications")
    sooner = entry["sooner"]
    cells = [
        f"`{entry['arm']}`",
        entry["setup"] or "",
        f"{entry['ttft']['median']:.3f} ({entry['ttft']['p95']:.3f})",
        f"{sooner['median']:.1f} ({sooner['lowest']:.1f} to {sooner['highest']:.1f})",
        "" if fewer is None else f"{fewer:.1f}x",
        *cells,
        "" if append is None else f"{append:.3f}",
        f"{entry['idle']:.3f}" if entry.get("idle") else "",
    ]
    return "| " + " | ".join(cells) + " |"
