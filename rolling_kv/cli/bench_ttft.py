"""`rolling-kv bench ttft`: time to the first token, beside the stock forward of transformers."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from rolling_kv.bench.ttft_setups import SETUPS
from rolling_kv.cli.model import about, loaded
from rolling_kv.cli.options import DeviceOption, DtypeOption, JsonOption, ModelOption
from rolling_kv.cli.output import print_json, progress_bar, results
from rolling_kv.errors import ConfigError

_ARMS = (
    "document-aligned@0.05:isolated",
    "token-topk@0.05:isolated",
    "document-aligned@0.05~0.25:isolated",
    "document-aligned@0.05:window:3",
    "token-topk@0.05:window:3",
    "direct-reuse:isolated",
)
_SETUPS, _WINDOWS = ("append", "ask", "warm"), (12, 24, 84)


class DetailName(StrEnum):
    short = "short"
    long = "long"


def ttft(
    out: Annotated[
        Path, typer.Option(help="A folder for rows, report, table and plot; a run that was stopped goes on.")
    ],
    model: ModelOption = "demo",
    arm: Annotated[
        list[str] | None,
        typer.Option(
            "--arm",
            help="policy[@ratio][~sample][+pipeline][:conditioning][+tail<n>], for example "
            f"document-aligned@0.05~0.25:window:3; may be repeated. Default: {', '.join(_ARMS)}.",
        ),
    ] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(
            "--setup",
            help="Where KV is. append, ask: in memory, and the new document is ingested when it is appended "
            "or asked about; idle: as append, after what the slide takes was computed between the calls; "
            "disk-append, disk-ask: the same in a folder; warm: a new session on a folder; "
            f"cold: nothing is stored (once a window). May be repeated. Default: {', '.join(_SETUPS)}.",
        ),
    ] = None,
    window: Annotated[
        list[int] | None,
        typer.Option(help=f"Documents; may be repeated. Default: {', '.join(map(str, _WINDOWS))}."),
    ] = None,
    requests: Annotated[int, typer.Option(help="Of each window; one more comes first and warms up.")] = 5,
    detail: Annotated[
        DetailName, typer.Option(help="Of the documents: about 45 or 90 tokens.")
    ] = DetailName.long,
    seed: Annotated[int, typer.Option(help="Of the documents.")] = 0,
    memory: Annotated[bool, typer.Option(help="Measure peak memory while warming up.")] = True,
    llama_cpp: Annotated[
        Path | None, typer.Option(help="A GGUF file of the same model, to be run by llama-cpp-python.")
    ] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Times rolling requests, each with one new document, and full prefill on the same prompts.

    Full prefill is the stock forward of transformers (sdpa, same dtype and threads, the last token's logits).
    The sides take turns at being first; ratios are within a request.
    """
    from rolling_kv.bench.memory import anonymous_bytes
    from rolling_kv.bench.plots import require_plots, ttft_against_window
    from rolling_kv.bench.ttft import TtftRun, require_fitting, run
    from rolling_kv.bench.ttft_arms import parse_ttft_arms
    from rolling_kv.bench.ttft_report import loading, markdown, summarise

    require_plots()
    if llama_cpp is not None and not llama_cpp.is_file():
        raise ConfigError(f"--llama-cpp is {str(llama_cpp)!r}, and there is no such file; expected GGUF.")
    if requests < 1:
        raise ConfigError(f"--requests is {requests}; expected at least 1.")
    plan = TtftRun(
        windows=_windows(window),
        arms=parse_ttft_arms(arm or _ARMS),
        setups=_setups(setup),
        requests=requests,
        detail=detail.value,
        seed=seed,
        memory=memory,
    )
    import torch  # so that its memory is not taken for the model's

    before = anonymous_bytes() if memory else 0
    with progress_bar() as progress:
        engine = loaded(model, dtype=dtype, device=device, progress=progress)
        require_fitting(engine, plan)
        llama = None
        if llama_cpp is not None:
            from rolling_kv.bench.llama_cpp import LlamaCpp

            llama = LlamaCpp(llama_cpp, positions=engine.max_positions, threads=torch.get_num_threads())
        rows = run(
            engine, plan, rows_path=out / "rows.jsonl", progress=progress, llama=llama, before_model=before
        )
    entries = summarise(rows)
    report = about(engine) | {
        "settings": {
            "windows": plan.windows,
            "arms": [one.name for one in plan.arms],
            "setups": plan.setups,
            "requests": requests,
            "detail": plan.detail,
            "seed": seed,
            "llama_cpp": None if llama is None else llama.name,
        },
        "weight_bytes": engine.weight_bytes,
        "kv_bytes_per_token": engine.kv_bytes_per_token,
        "loading": loading(rows),
        "entries": entries,
    }
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (out / "table.md").write_text(markdown(entries), encoding="utf-8")
    ttft_against_window(entries, out / "ttft-window.png", title=f"{engine.name}, {engine.identity.dtype}")
    if as_json:
        print_json(report)
        return
    for size in plan.windows:
        results.print(_table([entry for entry in entries if entry["window"] == size]))
    for one in report["loading"]:
        results.print(
            f"Loading {one['window']} documents from a folder: {one['bytes_per_second'] / 1e9:.2f} GB/s, "
            f"{one['share']:.0%} of numpy.memmap.",
            highlight=False,
        )
    results.print(f"Written to {out}: report.json, table.md, ttft-window.png, rows.jsonl.", highlight=False)


def _windows(given: list[int] | None) -> tuple[int, ...]:
    windows = tuple(dict.fromkeys(given or _WINDOWS))
    wrong = next((size for size in windows if size < 2), None)
    if wrong is not None:
        raise ConfigError(f"--window is {wrong}; expected at least 2 documents.")
    return windows


def _setups(given: list[str] | None) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(given or _SETUPS))
    for name in names:
        if name not in SETUPS:
            raise ConfigError(f"--setup is {name!r}; expected one of {', '.join(SETUPS)}.")
    return names


def _table(entries: list[dict[str, Any]]) -> Table:
    first = entries[0]
    title = f"{first['window']} documents, {first['prompt_tokens']:.0f} tokens, {first['requests']} requests"
    table = Table(box=None, pad_edge=False, padding=(0, 1), title=title, title_justify="left")
    table.add_column("arm", overflow="fold")
    table.add_column("setup", no_wrap=True)
    for column in ("TTFT", "P95", "sooner", "load", "select", "fuse"):
        table.add_column(column, justify="right", no_wrap=True)
    for entry in entries:
        phases = entry.get("phases", {})
        table.add_row(
            entry["arm"],
            entry["setup"] or "",
            f"{entry['ttft']['median']:.2f} s",
            f"{entry['ttft']['p95']:.2f}",
            f"{entry['sooner']['median']:.1f}x",
            *(f"{phases[name]:.2f}" if phases else "" for name in ("load", "select", "fuse")),
        )
    return table
