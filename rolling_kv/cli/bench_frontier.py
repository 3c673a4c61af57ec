"""`rolling-kv bench frontier`: agreement with full prefill against the computation that it costs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from rolling_kv.cli.model import about, loaded, parse_layers
from rolling_kv.cli.options import DeviceOption, DtypeOption, JsonOption, ModelOption
from rolling_kv.cli.output import print_json, progress_bar, results
from rolling_kv.config import DEFAULT_CONDITIONING, DEFAULT_FRESH_TAIL, DEFAULT_POLICY, DEFAULT_RATIO
from rolling_kv.workloads import ROLLING

_CONDITIONING = f"{DEFAULT_CONDITIONING}+tail{DEFAULT_FRESH_TAIL}"


def frontier(
    out: Annotated[
        Path, typer.Option(help="A folder for rows, report, table and plot; a run that was stopped goes on.")
    ],
    model: ModelOption = "demo",
    workload: Annotated[
        str, typer.Option(help=f"{', '.join(sorted(ROLLING))}; its window rolls.")
    ] = "rolling-needle",
    documents: Annotated[int, typer.Option(help="In the window.")] = 24,
    requests: Annotated[int, typer.Option(help="To measure.")] = 20,
    questions: Annotated[
        int,
        typer.Option(
            help="Of each window, before it rolls by one document. With several and --answerable, one pass "
            "over the window tells which of them are worth a full prefill each."
        ),
    ] = 1,
    answerable: Annotated[
        bool,
        typer.Option(
            "--answerable/--all", help="Measure only requests that full prefill answers as expected, or all."
        ),
    ] = True,
    conditioning: Annotated[
        list[str] | None,
        typer.Option(
            help="May be repeated; with +packed, +tail1, +idle or +layer6 behind it for packed positions, a "
            "fresh tail, slides computed in idle time, or selection at that layer. "
            f"Default: {_CONDITIONING}."
        ),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help=f"May be repeated. Default: {DEFAULT_POLICY}.")
    ] = None,
    ratio: Annotated[
        list[float] | None,
        typer.Option(help=f"Share to recompute; may be repeated. Default: {DEFAULT_RATIO}."),
    ] = None,
    cell: Annotated[
        list[str] | None,
        typer.Option(
            help="Instead of all combinations; may be repeated: qcfuse-spans@0.1:window:3+packed, "
            "document-aligned@0.05~0.25:isolated (deviations of a quarter of the tokens), "
            "batch:8 (evicting 8 at once, exactly), preroll."
        ),
    ] = None,
    max_new_tokens: Annotated[
        int,
        typer.Option(
            help="Of an answer that are compared; fewer where full prefill ends its line, or has answered."
        ),
    ] = 16,
    seed: Annotated[int, typer.Option(help="Of the workload.")] = 0,
    critical_layers: Annotated[
        str,
        typer.Option(
            help="Of qcfuse, 0-based, best first, such as 5,2,3; default: those known of the model."
        ),
    ] = "",
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Compares ways to keep and repair KV over a rolling window with full prefill, answer by answer.

    Computation is in multiplications, full prefill of the same prompt is 1: idle (pre-roll),
    append (the new document), slide (what losing the oldest costs) and ask (selection, recomputed tokens,
    the query).
    """
    from rolling_kv.bench.cells import grid, parse_cell
    from rolling_kv.bench.frontier import FrontierRun, run
    from rolling_kv.bench.frontier_report import markdown, summarise
    from rolling_kv.bench.plots import quality_against_work, require_plots
    from rolling_kv.bench.statistics import require_statistics

    require_plots()
    require_statistics()
    cells = [parse_cell(one) for one in cell or ()]
    if not cells or conditioning or policy or ratio:
        cells += grid(
            conditionings=conditioning or (_CONDITIONING,),
            policies=policy or (DEFAULT_POLICY,),
            ratios=ratio or (DEFAULT_RATIO,),
        )
    plan = FrontierRun(
        cells=tuple(dict.fromkeys(cells)),
        workload=workload,
        documents=documents,
        requests=requests,
        max_new_tokens=max_new_tokens,
        seed=seed,
        answerable=answerable,
        questions=questions,
    )
    with progress_bar() as progress:
        engine = loaded(
            model,
            dtype=dtype,
            device=device,
            progress=progress,
            critical_layers=parse_layers(critical_layers),
        )
        rows = run(
            engine,
            plan,
            rows_path=out / "rows.jsonl",
            progress=lambda done, total: progress(f"{done} of {total} requests", done / total),
        )
    entries = summarise(rows)
    settings = {"cells": [one.name for one in plan.cells]} | {
        name: getattr(plan, name)
        for name in ("workload", "documents", "requests", "questions", "max_new_tokens", "seed", "answerable")
    }
    report = about(engine) | {"settings": settings, "full_prefill": _full(rows), "entries": entries}
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (out / "table.md").write_text(markdown(entries) + "\n", encoding="utf-8")
    title = f"{engine.name}, {workload}, {documents} documents, {requests} requests"
    quality_against_work(entries, out / "frontier.png", title=title)
    if as_json:
        print_json(report)
    else:
        results.print(_table(entries, title=title))
        results.print(f"Written to {out}: report.json, table.md, frontier.png, rows.jsonl.", highlight=False)


def _full(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What full prefill took, and how often it was right."""
    from statistics import median

    from rolling_kv.bench.statistics import share_of

    right = [row["full_prefill"]["right"] for row in rows]
    asked = [row for row in rows if "prompt_tokens" in row]
    return {
        "prompt_tokens_median": median(row["prompt_tokens"] for row in asked),
        "ttft_median": median(row["full_prefill"]["ttft"] for row in asked),
        "right": asdict(share_of([bool(one) for one in right])),
    }


def _table(entries: list[dict[str, Any]], *, title: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), title=title, title_justify="left")
    table.add_column("cell", overflow="fold")
    for column in ("equal", "95%", "KL", "idle", "append", "slide", "ask", "sooner"):
        table.add_column(column, justify="right", no_wrap=True)
    for entry in entries:
        agreement, work = entry["answer_agreement"], entry["work"]
        table.add_row(
            entry["cell"],
            f"{agreement['share']:.2f}",
            f"{agreement['low']:.2f}-{agreement['high']:.2f}",
            f"{entry['kl']:.3f}",
            *(f"{100 * work[part]:.1f}%" for part in ("idle", "append", "slide", "ask")),
            f"{entry['speedup']:.1f}x",
        )
    return table
