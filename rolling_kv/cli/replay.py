"""`rolling-kv replay`: whether answers depend on the requests before, on a workload or a recorded agent."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rolling_kv.cli.model import about, loaded
from rolling_kv.cli.options import DeviceOption, DtypeOption, JsonOption
from rolling_kv.cli.output import errors, print_json, progress_bar, results
from rolling_kv.errors import ConfigError
from rolling_kv.workloads import LABELLED, Detail, LabelledRequest, market_requests

if TYPE_CHECKING:
    from rolling_kv.replay.history import History
    from rolling_kv.replay.report import ReplayReport
    from rolling_kv.replay.runner import ReplayRun

_ARMS = ("token-topk:first-seen", "document-aligned:first-seen", "document-aligned:window:3", "full-prefill")
_WORKLOAD, _WINDOW, _REQUESTS, _NEW_TOKENS = "market", 24, 30, 16


class ProtocolName(StrEnum):
    populate = "populate"
    plain = "plain"


class ControlName(StrEnum):
    repeat = "repeat"
    reset = "reset"


class DetailName(StrEnum):
    short = "short"
    long = "long"


def replay(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(help="Files that sessions recorded to (trace=...); without any, a workload is run."),
    ] = None,
    workload: Annotated[
        str | None, typer.Option(help=f"{', '.join(LABELLED)}, or a .jsonl file. Default: {_WORKLOAD}.")
    ] = None,
    window: Annotated[
        int | None, typer.Option(help=f"Documents in a window of the workload. Default: {_WINDOW}.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help=f"At most. Default: {_REQUESTS} of a workload, all of a trace.")
    ] = None,
    detail: Annotated[DetailName | None, typer.Option(help="Of market's records. Default: short.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help=f"Of an answer to a workload's request. Default: {_NEW_TOKENS}.")
    ] = None,
    arms: Annotated[
        str | None,
        typer.Option(
            help="With commas between, each policy[@ratio][:conditioning][+tail<n>], full-prefill, or "
            f"session, the settings recorded with a trace. Default: session; of a workload {','.join(_ARMS)}."
        ),
    ] = None,
    ratio: Annotated[float, typer.Option(help="Of arms that name none, from 0 to 1.")] = 0.05,
    orders: Annotated[
        str,
        typer.Option(
            help="How many (chronological, reversed and random ones), or names with commas between: "
            "chronological, reversed, random:<seed>, or a file that lists request numbers."
        ),
    ] = "5",
    protocol: Annotated[
        ProtocolName,
        typer.Option(help="populate runs the window of the request before first; plain does not."),
    ] = ProtocolName.populate,
    control: Annotated[
        list[ControlName] | None,
        typer.Option(
            help="repeat: chronological once more. reset: the store is emptied before every request. May be "
            "repeated."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the workload and of the first random order.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="A folder for rows, report and plots; a run that was stopped goes on there."),
    ] = None,
    differences: Annotated[
        bool,
        typer.Option(
            "--differences",
            help="Also print every request whose answer differs, with where its orders part. JSON has them "
            "anyway.",
        ),
    ] = False,
    max_variation: Annotated[
        float | None, typer.Option(help="Exit code 3 when more of an arm's answers differ between orders.")
    ] = None,
    min_fidelity: Annotated[
        float | None,
        typer.Option(help="Exit code 3 when fewer of an arm's answers, in any order, are full prefill's."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="A model folder, a hub id, demo, smollm2 or gemma3-270m. Default: the one a trace was "
            "recorded with, or demo."
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes that replay beside each other; times to the first token are then those of a busy "
            "machine. Default: as many as there are threads and the memory holds, on a GPU 1."
        ),
    ] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Replays requests in several orders, and shows whether answers depend on the order.

    Every arm goes through every order from an empty store. Variation: the share of pairs of orders whose
    answers differ. Fidelity: the share of answers that are full prefill's, token by token.
    """
    from rolling_kv.bench.arms import parse_arms
    from rolling_kv.engine import load_engine
    from rolling_kv.replay.crew import Workers, share_out
    from rolling_kv.replay.orders import parse_orders
    from rolling_kv.replay.report import summarise, write_report
    from rolling_kv.replay.runner import ReplayRun
    from rolling_kv.replay.runner import replay as run_replay

    _require_extras(out)
    for name, bound in (("--max-variation", max_variation), ("--min-fidelity", min_fidelity)):
        if bound is not None and not 0.0 <= bound <= 1.0:
            raise ConfigError(f"{name} is {bound:g}; expected a share from 0 to 1.")
    if traces:
        _refuse_beside_traces(workload=workload, window=window, detail=detail, max_new_tokens=max_new_tokens)
        history = _recorded(traces, requests=requests)
    else:
        history = _made(
            workload or _WORKLOAD,
            window=window,
            requests=requests,
            detail=detail,
            max_new_tokens=_NEW_TOKENS if max_new_tokens is None else max_new_tokens,
            seed=seed,
        )
    names = arms.split(",") if arms is not None else ["session"] if traces else list(_ARMS)
    run = ReplayRun(
        arms=parse_arms(names, ratio=ratio),
        orders=parse_orders(orders, count=len(history), seed=seed),
        protocol=protocol.value,
        controls=tuple(dict.fromkeys(one.value for one in control or ())),
    )
    for name, wanted in (("--max-variation", max_variation is not None), ("--differences", differences)):
        if wanted and len(run.orders) < 2:
            raise ConfigError(f"{name} compares orders, and there is one; give --orders 2 or more.")
    with progress_bar() as progress:
        name = model or (history.model.name if history.model is not None else "demo")
        engine = loaded(name, dtype=dtype, device=device, progress=progress)
        count, threads = share_out(engine, asked=workers, passes=len(list(run.passes(len(history)))))
        opening = partial(load_engine, name, dtype=dtype, device=device)
        replayed = run_replay(
            engine,
            history,
            run,
            out=out,
            workers=Workers(count, threads, opening) if count > 1 else None,
            progress=lambda done, total, what: progress(f"{done} of {total}: {what}", done / max(total, 1)),
        )
    settings = (
        about(engine) | _described(history, run) | {"workers": {"processes": count, "threads": threads}}
    )
    report = summarise(replayed.references, replayed.rows, settings=settings)
    if out is not None:
        write_report(report, out)
    failed = _failed(report, run, max_variation=max_variation, min_fidelity=min_fidelity)
    if as_json:
        print_json(report.to_dict() | {"failed": failed})
    else:
        _show(report, out, differences=differences)
    for problem in failed:
        errors.print(f"failed: {problem}", style="red", highlight=False, markup=False)
    if failed:
        raise typer.Exit(3)


def _made(
    workload: str,
    *,
    window: int | None,
    requests: int | None,
    detail: DetailName | None,
    max_new_tokens: int,
    seed: int,
) -> History:
    """The history of an agent that makes the requests of a workload."""
    from rolling_kv.bench.requests import requests_of
    from rolling_kv.replay.history import history_of_requests

    count = _REQUESTS if requests is None else requests
    size = _WINDOW if window is None else window
    for name, value in (("--requests", count), ("--window", size), ("--max-new-tokens", max_new_tokens)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; expected at least 1.")
    if detail is not None and workload != "market":
        raise ConfigError(f"--detail is that of market's records, and the workload is {workload}.")
    if window is not None and workload.endswith(".jsonl"):
        raise ConfigError("--window is that of the workloads made here; a file's requests bring their own.")
    if workload == "market":
        level: Detail = "short" if detail is None else detail.value
        made: list[LabelledRequest] = list(
            islice(market_requests(seed, documents=size, detail=level, question="field"), count)
        )
    else:
        made = requests_of(workload, seed=seed, documents=(size, size), count=count)
    return history_of_requests(made, source=workload, max_new_tokens=max_new_tokens)


def _recorded(traces: list[Path], *, requests: int | None) -> History:
    """The history that sessions recorded."""
    from rolling_kv.replay.history import history_of_traces
    from rolling_kv.replay.trace import read_trace

    if requests is not None and requests < 1:
        raise ConfigError(f"--requests is {requests}; expected at least 1.")
    recordings = [read_trace(path) for path in traces]
    for recording in recordings:
        if recording.cut:
            errors.print(
                f"{recording.path}: the last line was cut off, and is left out.", style="yellow", markup=False
            )
    history = history_of_traces(recordings)
    return history if requests is None else history.first(requests)


def _refuse_beside_traces(**options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} is that of a workload, and a trace was given. Leave one of them "
                "out."
            )


def _require_extras(out: Path | None) -> None:
    """Says what is missing before anything is computed."""
    from rolling_kv.bench.plots import require_plots
    from rolling_kv.bench.statistics import require_statistics
    from rolling_kv.replay.page import require_page

    require_statistics()
    if out is not None:
        require_plots()
        require_page()


def _described(history: History, run: ReplayRun) -> dict[str, Any]:
    return {
        "source": history.source,
        "requests": len(history),
        "history": history.digest,
        "protocol": run.protocol,
        "controls": list(run.controls),
        "orders": {order.name: list(order.requests) for order in run.orders},
        "arms": {arm.name: arm.settings() or dict(history.settings or {}) for arm in run.arms},
    }


def _failed(
    report: ReplayReport, run: ReplayRun, *, max_variation: float | None, min_fidelity: float | None
) -> list[str]:
    """The bounds that do not hold, in words."""
    problems = []
    for arm in run.arms:
        if max_variation is not None:
            found = report.variation(arm.name)
            if found.share > max_variation:
                problems.append(
                    f"{arm.name}: answers differ in {found.hits} of {found.count} pairs of orders "
                    f"({found.share:.3f}), more than {max_variation:g}"
                )
        for order in run.orders if min_fidelity is not None else ():
            found = report.fidelity(arm.name, order.name)
            if min_fidelity is not None and found.share < min_fidelity:
                problems.append(
                    f"{arm.name}, {order.name}: {found.hits} of {found.count} answers are full prefill's "
                    f"({found.share:.3f}), fewer than {min_fidelity:g}"
                )
    return problems


def _show(report: ReplayReport, out: Path | None, *, differences: bool) -> None:
    from rolling_kv.replay.report import details, notes, table

    results.print(table(report))
    for note in notes(report):
        results.print(note, highlight=False, markup=False)
    if differences:
        lines = list(details(report)) or ["No answer differs between orders."]
        results.print("\n".join(lines), highlight=False, markup=False, emoji=False, soft_wrap=True)
    if out is not None:
        results.print(f"Written to {out}: report.html, report.json, rows.jsonl and plots.", highlight=False)
