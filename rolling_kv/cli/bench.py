"""`rolling-kv bench`: measurements on the user's own machine and model."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from rolling_kv.cli.bench_frontier import frontier
from rolling_kv.cli.bench_ttft import ttft
from rolling_kv.cli.model import about, loaded, parse_layers
from rolling_kv.cli.options import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
)
from rolling_kv.cli.output import print_json, progress_bar, results
from rolling_kv.config import require_ratio
from rolling_kv.errors import ConfigError
from rolling_kv.policies import POLICIES
from rolling_kv.window import parse_conditioning
from rolling_kv.workloads import LABELLED

app = typer.Typer(
    help="Measures on this machine: policies, the frontier, time to first token.", no_args_is_help=True
)
app.command()(frontier)
app.command()(ttft)


@app.command()
def policies(
    out: Annotated[
        Path, typer.Option(help="A folder for rows, report, table and plot; a run that was stopped goes on.")
    ],
    model: ModelOption = "demo",
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join(LABELLED)}, or a .jsonl file; may be repeated. Default: all but market-copy."
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help=f"May be repeated; default: all. Known ones: {', '.join(POLICIES)}."),
    ] = None,
    ratio: Annotated[
        list[float] | None,
        typer.Option(help="Share to recompute; may be repeated. Default: 5, 10, 20, 30, 50%."),
    ] = None,
    requests: Annotated[int, typer.Option(help="Of each workload.")] = 12,
    documents: Annotated[str, typer.Option(help="Of a request: a number, or a range such as 16-32.")] = "16",
    conditioning: Annotated[
        str, typer.Option(help="isolated, instruction or window:<documents>.")
    ] = "isolated",
    seed: Annotated[int, typer.Option(help="Of the workloads.")] = 0,
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
    """Runs all recompute policies at equal budgets on labelled requests, against full prefill.

    Agreement: the greedy answer is full prefill's, token by token. KL and top-1 agreement are over the
    full-prefill answer, teacher-forced. Recall: labelled tokens among those that were selected.
    """
    from rolling_kv.bench.plots import quality_against_ttft, require_plots
    from rolling_kv.bench.policies import RATIOS, WORKLOADS, PoliciesRun, markdown, run, summarise
    from rolling_kv.bench.requests import parse_documents
    from rolling_kv.bench.statistics import require_statistics

    require_plots()
    require_statistics()
    if not parse_conditioning(conditioning).deterministic:
        raise ConfigError(
            f"--conditioning is {conditioning!r}, under which a document's KV depends on history. Expected "
            "isolated, instruction, window:<documents> or full."
        )
    if requests < 1:
        raise ConfigError(f"--requests is {requests}; expected at least 1.")
    plan = PoliciesRun(
        workloads=tuple(dict.fromkeys(workload or WORKLOADS)),
        policies=tuple(dict.fromkeys(policy or ())),
        ratios=tuple(dict.fromkeys(require_ratio(one) for one in ratio or RATIOS)),
        conditioning=conditioning,
        documents=parse_documents(documents),
        requests=requests,
        seed=seed,
    )
    plan.arms()  # names an unknown policy before the model is loaded
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
            progress=lambda done, total, what: progress(f"{done} of {total} requests, {what}", done / total),
        )
    entries = summarise(rows)
    report = about(engine) | {"settings": asdict(plan), "full_prefill": _full(rows), "entries": entries}
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    workloads = list(dict.fromkeys(entry["workload"] for entry in entries))
    tables = [f"### {name}\n\n{markdown(entries, workload=name)}\n" for name in workloads]
    (out / "table.md").write_text("\n".join(tables), encoding="utf-8")
    title = f"{engine.name}, {plan.conditioning}, {documents} documents"
    quality_against_ttft(entries, out / "quality-ttft.png", title=title)
    if as_json:
        print_json(report)
    else:
        results.print(_table(entries, workload=workloads[-1]))
        results.print(
            f"Written to {out}: report.json, table.md, quality-ttft.png, rows.jsonl.", highlight=False
        )


def _full(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How often full prefill itself was right, by workload; None where no request says what is right."""
    found: dict[str, Any] = {}
    for row in rows:
        one = found.setdefault(
            row["workload"], {"requests": 0, "right": None, "prompt_tokens": [], "ttft": []}
        )
        one["requests"] += 1
        if row["full_prefill"]["right"] is not None:
            one["right"] = (one["right"] or 0) + row["full_prefill"]["right"]
        one["prompt_tokens"].append(row["prompt_tokens"])
        one["ttft"].append(row["full_prefill"]["ttft"])
    for one in found.values():
        for key in ("prompt_tokens", "ttft"):
            one[f"{key}_median"] = sorted(one.pop(key))[one["requests"] // 2]
    return found


def _table(entries: list[dict[str, Any]], *, workload: str) -> Table:
    """The figures of one workload that fit a terminal; the report has all."""
    title = f"{workload}: answers equal to full prefill's (95% interval)"
    table = Table(box=None, pad_edge=False, padding=(0, 1), title=title, title_justify="left")
    table.add_column("policy", overflow="fold")
    for column in ("ratio", "equal", "95%", "KL", "recall", "segments", "select", "sooner"):
        table.add_column(column, justify="right", no_wrap=True)
    for entry in entries:
        if entry["workload"] != workload:
            continue
        agreement = entry["answer_agreement"]
        table.add_row(
            entry["policy"],
            f"{100 * entry['ratio']:g}%",
            f"{agreement['share']:.2f}",
            f"{agreement['low']:.2f}-{agreement['high']:.2f}",
            f"{entry['kl']:.3f}",
            _figure(entry["recall"]),
            f"{entry['segments']:.0f}",
            f"{entry['select_seconds'] * 1000:.0f} ms",
            f"{entry['speedup']:.1f}x",
        )
    return table


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
