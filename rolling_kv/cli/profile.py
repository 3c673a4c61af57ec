"""`rolling-kv profile`: what selectors need to know of a model, measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from rolling_kv.cli.model import about, loaded
from rolling_kv.cli.options import (
    ConditioningOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
)
from rolling_kv.cli.output import print_json, progress_bar, results
from rolling_kv.config import DEFAULT_CONDITIONING, require_ratio
from rolling_kv.errors import ConfigError
from rolling_kv.window import parse_conditioning
from rolling_kv.workloads import LABELLED


def profile(
    model: ModelOption = "demo",
    workload: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(LABELLED)}, or your own .jsonl file, an object a line: documents (texts), "
            "query, spans (document, first character, character after the last)."
        ),
    ] = "needle",
    requests: Annotated[int, typer.Option(help="How many.")] = 20,
    documents: Annotated[
        str, typer.Option(help="Of a request: a number, or a range such as 16-32.")
    ] = "16-32",
    conditioning: ConditioningOption = DEFAULT_CONDITIONING,
    ratio: Annotated[float, typer.Option(help="Recomputed where agreement is measured.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Of the workload.")] = 1000,
    out: Annotated[Path | None, typer.Option(help="A folder for profile.json and profile.png.")] = None,
    save: Annotated[bool, typer.Option(help="Keep the result, for calls with this model.")] = True,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Measures which layers of a model localise an answer, and which tokens become attention sinks.

    Localising layers are ranked by Recall@10% over labelled answers, with stored KV that has seen nothing
    else (QCFuse, section 3.4). Deviation layers and sinks are measured under the given conditioning. The
    result is kept by the model's fingerprint, and used by qcfuse, qcfuse-spans and sink-repair from then on.
    """
    from rolling_kv.bench.plots import require_plots
    from rolling_kv.bench.profile import model_profile, plot
    from rolling_kv.bench.profile import profile as measure
    from rolling_kv.bench.requests import parse_documents, requests_of
    from rolling_kv.bench.statistics import require_statistics
    from rolling_kv.engine.profiles import write_profile

    require_statistics()
    if requests < 1:
        raise ConfigError(f"--requests is {requests}; expected at least 1.")
    require_ratio(ratio)
    if not parse_conditioning(conditioning).deterministic:
        raise ConfigError(
            f"--conditioning is {conditioning!r}, under which a document's KV depends on history. Expected "
            "isolated, instruction, window:<documents> or full."
        )
    if out is not None:
        require_plots()
    found = requests_of(workload, seed=seed, documents=parse_documents(documents), count=requests)
    with progress_bar() as progress:
        engine = loaded(model, dtype=dtype, device=device, progress=progress)
        report = measure(
            engine,
            found,
            conditioning=conditioning,
            ratio=ratio,
            progress=lambda done, total: progress(f"{done} of {total} requests", done / total),
        )
    measured = f"{report['requests']} requests of {workload}, {documents} documents, seed {seed}"
    kept = model_profile(report, measured=measured)
    report = about(engine) | report | {"measured": measured, "profile": kept.model_dump(mode="json")}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "profile.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        plot(report, out / "profile.png")
    path = write_profile(kept) if save else None
    if as_json:
        print_json(report | {"kept_at": None if path is None else str(path)})
        return
    _show(report)
    if path is not None:
        results.print(f"Kept for this model at {path}.", highlight=False)


def _show(report: dict[str, Any]) -> None:
    found, deviation = report["localisation"], report["deviation"]
    layers = Table(box=None, pad_edge=False, title="Layers", title_justify="left")
    agreement = [f"{policy} agreement" for policy in deviation["layers"][0]["policies"]]
    shown = ("layer", "Recall@10%", "document rank", "recall of differing tokens", "cost", *agreement)
    for column in shown:
        layers.add_column(column, justify="right")
    for one in deviation["layers"]:
        layers.add_row(
            str(one["layer"]),
            f"{found['single_layer'][one['layer']]['recall']:.2f}",
            f"{found['single_layer'][one['layer']]['document_rank']:.1f}",
            f"{one['recall_of_differing']:.2f}",
            f"{one['cost']:.0%}",
            *(f"{policy['answer_agreement']:.2f}" for policy in one["policies"].values()),
        )
    results.print(layers)
    chosen = report["profile"]["critical_layers"]
    best = next(entry for entry in found["top_k"] if entry["layers"] == chosen)
    results.print(
        f"Critical layers {', '.join(map(str, chosen))}: Recall@10% {best['recall']:.2f} together, "
        f"all layers {found['all_layers']:.2f}, the whole context probed {found['whole_context']:.2f}.",
        highlight=False,
    )
    sinks = deviation["sinks"]
    if sinks["layer"] is None:
        results.print("No tokens were found that become sinks behind the stored KV's back.")
    else:
        results.print(
            f"Sinks: {sinks['found']} in {sinks['requests']} requests, tokens {sinks['texts']}, plain at "
            f"layer {sinks['layer']}.",
            markup=False,
            highlight=False,
        )
