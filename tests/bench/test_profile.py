"""Profiling: recalls and ranks against literal readings, sinks that are planted, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rolling_kv.bench.deviation_layers import DeviationLayers
from rolling_kv.bench.laid_out import lay_out
from rolling_kv.bench.localisation import Localisation
from rolling_kv.bench.profile import measured_layers, profile
from rolling_kv.engine.host import TransformersHost
from rolling_kv.engine.probe import probe_anchors, probe_context
from rolling_kv.engine.profiles import read_profile
from rolling_kv.errors import BenchError
from rolling_kv.workloads import LABELLED, LabelledRequest
from tests.bench.commands import command
from tests.engine.stock import stock_kv


def needle(seed: int = 0, *, documents: int = 5) -> LabelledRequest:
    return next(LABELLED.create("needle")(seed, documents=documents))


def test_recall_and_rank_are_their_definitions(llama_engine: TransformersHost) -> None:
    laid = lay_out(llama_engine, needle(), conditioning="isolated")
    context = laid.plan.query_start
    scores = torch.rand(context, generator=torch.Generator().manual_seed(1))
    ranked = sorted(range(context), key=lambda index: (-float(scores[index]), index))
    kept = set(ranked[: context // 10])
    assert laid.recall(scores) == pytest.approx(len(kept & laid.labelled) / len(laid.labelled))
    documents = [part.segment for part in laid.plan.stored if part.segment.kind == "document"]
    means = [float(scores[s.start : s.stop].double().mean()) for s in documents]
    asked = needle().spans[0].document
    assert laid.document_rank(scores) == sum(mean > means[asked] for mean in means)
    text = needle().text(needle().spans[0])
    ids = [laid.plan.prompt.token_ids[position] for position in sorted(laid.labelled)]
    assert llama_engine.tokenizer.decode(ids) == text


def test_deviations_are_the_distance_to_the_stock_keys(tiny_engine: TransformersHost) -> None:
    laid = lay_out(tiny_engine, needle(documents=3), conditioning="isolated")
    stock = stock_kv(tiny_engine, laid.plan.prompt.token_ids)
    stored = laid.stitched()
    for layer, found in enumerate(laid.deviations()):
        current = stock[layer][0][:, laid.plan.prefix : laid.plan.query_start]
        kept = stored.layer(layer)[0][0, :, laid.plan.prefix : laid.plan.query_start]
        expected = (current - kept).square().sum((0, 2))
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_curves_are_recalls_of_sums_over_layers(llama_engine: TransformersHost) -> None:
    """Anchors that are all tokens are the whole context, so that the sweep's end is known."""
    localisation = Localisation(layers=llama_engine.layers)
    laid = [lay_out(llama_engine, needle(seed), conditioning="isolated") for seed in range(2)]
    for one in laid:
        localisation.add(one)
    report = localisation.report()
    single = [entry["recall"] for entry in report["single_layer"]]
    for layer, recall in enumerate(single):
        by_hand = [one.recall(mass[layer]) for one, mass in zip(laid, localisation.masses, strict=True)]
        assert recall == pytest.approx(sum(by_hand) / 2)
    assert [single[layer] for layer in report["ranked_layers"]] == sorted(single, reverse=True)
    top = report["top_k"][2]
    assert top["layers"] == report["ranked_layers"][:3]
    sums = [mass[top["layers"]].sum(0) for mass in localisation.masses]
    assert top["recall"] == pytest.approx(sum(o.recall(s) for o, s in zip(laid, sums, strict=True)) / 2)
    assert {(a["rule"], a["ratio"]) for a in report["anchors"]} == {
        (rule, ratio) for rule in ("kvzip", "knorm", "sink") for ratio in (0.02, 0.05, 0.1, 0.2, 0.4)
    }
    one = laid[0]
    start = one.plan.query_start
    asked = (llama_engine, one.stitched(), one.plan.prompt.token_ids[start:])
    whole = probe_context(*asked, start=start, layers=range(6))
    every = probe_anchors(*asked, start=start, layers=range(6), anchors=one.placed)
    torch.testing.assert_close(whole, every, atol=1e-5, rtol=1e-4)
    assert one.recall(whole.sum(0)) == localisation.context[0]


class Planted:
    """A request whose deviations are given."""

    def __init__(self, deviation: torch.Tensor, ids: list[int]) -> None:
        self._deviation = deviation
        prompt = type("Prompt", (), {"token_ids": tuple(ids)})
        self.plan = type("Plan", (), {"prompt": prompt, "prefix": 0, "query_start": len(ids)})

    def deviations(self) -> torch.Tensor:
        return self._deviation


def test_planted_sinks_are_found_with_the_layer_that_shows_them() -> None:
    """Token 7 deviates 40 times as much as all others from layer 5 of 8 on, and a little from layer 3."""
    layers = DeviationLayers(layers=8)
    deviation = torch.ones(8, 60)
    deviation[3:5, 11] = 5.0
    deviation[5:, 11] = 40.0
    ids = [1] * 60
    ids[11] = 7
    layers.add(Planted(deviation, ids))  # type: ignore[arg-type]  # stands in for a LaidOut
    assert layers.sink_traits() == ((7,), 5)
    plain = DeviationLayers(layers=8)
    plain.add(Planted(torch.ones(8, 60), ids))  # type: ignore[arg-type]  # stands in for a LaidOut
    assert plain.sink_traits() == ((), None)
    report = layers.report(str)
    assert report["sinks"]["share_of_tokens"] == pytest.approx(1 / 60)
    assert [entry["layer"] for entry in report["layers"]] == list(range(1, 8))


def test_deep_models_are_sampled_evenly() -> None:
    assert measured_layers(6) == [1, 2, 3, 4, 5]
    sampled = measured_layers(80)
    assert (sampled[0], sampled[-1], len(sampled)) == (1, 79, 9)


def test_a_profile_needs_labels(llama_engine: TransformersHost) -> None:
    request = LabelledRequest(documents=("a",), query="b", answer_prefix="", expected="", spans=())
    with pytest.raises(BenchError, match="spans"):
        profile(llama_engine, [request], conditioning="isolated", ratio=0.1, progress=lambda *_: None)


def test_the_command_keeps_what_it_measured(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROLLING_KV_CACHE", str(tmp_path / "cache"))
    arguments = ["profile", "--model", str(llama_folder), "--requests", "2", "--documents", "6"]
    arguments += ["--conditioning", "window:3", "--out", str(tmp_path / "out"), "--json"]
    assert command(monkeypatch, *arguments) == 0
    report = json.loads(capsys.readouterr().out)
    kept = read_profile(report["profile"]["model"], layers=6)
    assert kept is not None
    together = report["localisation"]["top_k"][:3]
    best = max(entry["recall"] for entry in together)
    shortest = next(entry for entry in together if entry["recall"] == best)
    assert list(kept.critical_layers) == shortest["layers"]
    assert Path(report["kept_at"]).is_file()
    assert (tmp_path / "out" / "profile.png").read_bytes().startswith(b"\x89PNG")
    agreement = report["deviation"]["layers"][0]["policies"]
    assert set(agreement) == {"token-topk", "document-aligned"}
    assert command(monkeypatch, *arguments[:-1], "--no-save") == 0
    assert "Critical layers" in capsys.readouterr().out


def test_profiling_a_mode_that_depends_on_history_is_refused(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "profile", "--model", str(llama_folder), "--conditioning", "first-seen") == 1
    assert "depends on history" in " ".join(capsys.readouterr().err.split())
