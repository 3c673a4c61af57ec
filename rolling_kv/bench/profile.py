"""Profiling a model: critical layers, anchors, the deviation layer, and sinks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolling_kv.bench.deviation_layers import DeviationLayers
from rolling_kv.bench.fidelity import Arm, measure, reference_of
from rolling_kv.bench.laid_out import lay_out
from rolling_kv.bench.localisation import DEFAULT_ANCHORS, Localisation
from rolling_kv.bench.plots import curves
from rolling_kv.bench.requests import window_of
from rolling_kv.errors import BenchError
from rolling_kv.workloads import LabelledRequest

if TYPE_CHECKING:
    from rolling_kv.engine.host import TransformersHost
    from rolling_kv.engine.profiles import ModelProfile

POLICIES = ("token-topk", "document-aligned")
MOST_LAYERS = 9  # whose agreement is measured


def profile(
    engine: TransformersHost,
    requests: Sequence[LabelledRequest],
    *,
    conditioning: str,
    ratio: float,
    progress: Callable[[int, int], None],
) -> dict[str, Any]:
    """Measures a model on labelled requests.

    Localisation is measured under `isolated`, as in QCFuse; deviations and agreement under `conditioning`.

    Args:
        ratio: of the agreement by deviation layer.
        progress: called with how many requests are done, of how many.

    Raises:
        BenchError: no request has a labelled span, or nothing of one is reusable.
    """
    labelled = [request for request in requests if request.spans]
    if not labelled:
        raise BenchError(
            "None of the requests has labelled spans; a profile needs them. See `spans` in the docs."
        )
    localisation = Localisation(layers=engine.layers)
    deviation = DeviationLayers(layers=engine.layers)
    for number, request in enumerate(labelled):
        progress(number, len(labelled))
        conditioned = lay_out(engine, request, conditioning=conditioning)
        if not conditioned.plan.reusable:
            raise BenchError(
                f"Under {conditioning!r} all of a request of {len(request.documents)} documents is exact "
                "prefix, so nothing deviates. Profile with more documents, or with fewer neighbours."
            )
        localisation.add(lay_out(engine, request, conditioning="isolated"))
        deviation.add(conditioned)
        _agreement(engine, request, deviation, conditioning=conditioning, ratio=ratio)
    progress(len(labelled), len(labelled))
    return {
        "model": asdict(engine.identity),
        "requests": len(labelled),
        "conditioning": conditioning,
        "ratio": ratio,
        "localisation": localisation.report(),
        "deviation": deviation.report(engine.tokenizer.decode),
    }


def model_profile(report: dict[str, Any], *, measured: str) -> ModelProfile:
    """What calls use of a report: the layers that localise best together, at most three, and the sinks.

    QCFuse always takes three; where a second or third layer only blurs what the first one finds, it is left
    out.
    """
    from rolling_kv.engine.profiles import ModelProfile

    sinks = report["deviation"]["sinks"]
    best = max(report["localisation"]["top_k"][:3], key=lambda entry: entry["recall"])
    return ModelProfile(
        model=report["model"]["model"].partition("-")[0],
        name=report["model"]["name"],
        critical_layers=tuple(best["layers"]),
        sink_token_ids=tuple(sinks["token_ids"]),
        sink_layer=sinks["layer"],
        measured=measured,
    )


def measured_layers(layers: int) -> list[int]:
    """Layers from 1 on, at most `MOST_LAYERS` of them, evenly spaced."""
    every = list(range(1, layers))
    if len(every) <= MOST_LAYERS:
        return every
    return sorted({every[round(n * (len(every) - 1) / (MOST_LAYERS - 1))] for n in range(MOST_LAYERS)})


def _agreement(
    engine: TransformersHost,
    request: LabelledRequest,
    deviation: DeviationLayers,
    *,
    conditioning: str,
    ratio: float,
) -> None:
    with window_of(engine, request, conditioning=conditioning, anchors=False) as session:
        reference = reference_of(session, request, max_new_tokens=16)
        for layer in measured_layers(engine.layers):
            for policy in POLICIES:
                arm = Arm(policy=policy, ratio=ratio, selection_layer=layer)
                outcome = measure(session, request, reference, arm, stats=False)
                deviation.outcomes.setdefault(arm, []).append(outcome)


def plot(report: dict[str, Any], path: Path) -> None:
    """The figures of a report as one PNG: anchors, single layers, top-k layers, deviation layers."""
    found, layers = report["localisation"], report["deviation"]["layers"]
    rules = list(dict.fromkeys(one["rule"] for one in found["anchors"]))
    whole: tuple[Sequence[Any], Sequence[float]] = ([0], [found["whole_context"]])
    anchors = {
        rule: _line([one for one in found["anchors"] if one["rule"] == rule], "ratio", "recall")
        for rule in rules
    }
    deviation = {"tokens that truly differ, recall": _line(layers, "layer", "recall_of_differing")}
    for policy in POLICIES:
        own = [one for one in layers if policy in one["policies"]]
        points = [one["policies"][policy]["answer_agreement"] for one in own]
        deviation[f"{policy}, agreement"] = ([one["layer"] for one in own], points)
    recall = "Recall@10%"
    curves(
        [
            ("Anchors", "anchor ratio", recall, anchors | {"whole context": whole}),
            (
                "One layer",
                "layer",
                recall,
                {
                    "{} {:.0%}".format(*DEFAULT_ANCHORS): _line(found["single_layer"], "layer", "recall"),
                    "all layers": ([0], [found["all_layers"]]),
                },
            ),
            ("Best layers together", "layers", recall, {"top k": _line(found["top_k"], "k", "recall")}),
            ("Deviation layer", "selection layer", f"share, at {report['ratio']:.0%}", deviation),
        ],
        path,
        title=f"{report['model']['name']}, {report['requests']} requests",
    )


def _line(entries: Sequence[dict[str, Any]], x: str, y: str) -> tuple[Sequence[Any], Sequence[float]]:
    return [one[x] for one in entries], [one[y] for one in entries]
