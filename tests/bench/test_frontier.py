"""`bench frontier`: cells, what a slide costs counted by hand, going on after a stop, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from rolling_kv.bench import frontier as frontier_module
from rolling_kv.bench.cells import grid, parse_cell
from rolling_kv.bench.fidelity import Reference
from rolling_kv.bench.frontier import FrontierRun, run
from rolling_kv.bench.frontier_report import best, markdown, summarise
from rolling_kv.engine.host import TransformersHost
from rolling_kv.errors import BenchError, ConfigError, RollingKVError
from rolling_kv.session import RollingSession
from rolling_kv.workloads import LabelledRequest
from tests.bench.commands import command

CELLS = (
    "direct-reuse:isolated",
    "token-topk@1:isolated",
    "qcfuse@0.2:isolated",
    "document-aligned@0.2:window:2",
    "document-aligned@0.2~0.5:window:2+tail1",
    "direct-reuse:stream:2",
    "epic@0.2:window:2+idle",
    "batch:3",
    "preroll",
)
PLAN = FrontierRun(
    cells=tuple(map(parse_cell, CELLS)),
    workload="rolling-needle",
    documents=5,
    requests=4,
    max_new_tokens=2,
    seed=1,
    answerable=False,  # a random model answers nothing as expected
)


def silent(done: int, total: int) -> None:
    """Takes no notice."""


@pytest.mark.parametrize("text", [*CELLS, "sink-repair:qcfuse-spans@0.05:window:3+packed+tail2+idle+layer6"])
def test_a_cell_is_read_as_it_is_written(text: str) -> None:
    assert parse_cell(text).name == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "epic@2:isolated", "nothing@0.1:isolated", "batch:x", "session", "direct-reuse@0.1:isolated"),
        *("epic@0.1:window", "epic@0.1:isolated+packed+packed", "epic@0.1:isolated+tail0", "batch:0"),
        *(
            "full-prefill:isolated",
            "epic@0.1:isolated+loose",
            "epic@0.1:isolated+tail",
            "epic@0.1.2:isolated",
        ),
        *(
            "epic@0.1:isolated+packed2",
            "epic@0.1:isolated+idle1",
            "epic@0.1:isolated+layer0",
            "epic@0.1:isolated+layer2+layer3",
        ),
        *("epic@0.1~0.5:isolated", "token-topk@0.1~2:isolated", "token-topk@0.1~:isolated"),
    ],
)
def test_what_is_no_cell_is_refused(text: str) -> None:
    with pytest.raises(RollingKVError):
        parse_cell(text)


def test_a_grid_is_every_combination_once() -> None:
    cells = grid(
        conditionings=("isolated", "window:3+packed"), policies=("epic", "direct-reuse"), ratios=(0.05, 0.1)
    )
    assert [cell.name for cell in cells] == [
        *("epic@0.05:isolated", "epic@0.1:isolated", "direct-reuse:isolated"),
        *("epic@0.05:window:3+packed", "epic@0.1:window:3+packed", "direct-reuse:window:3+packed"),
    ]


@pytest.fixture(scope="module")
def rows(llama_engine: TransformersHost, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("frontier") / "rows.jsonl"
    return run(llama_engine, PLAN, rows_path=path, progress=silent)


@pytest.fixture(scope="module")
def entries_in_tokens(llama_engine: TransformersHost, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Without attention, so that computation is proportional to the tokens that are computed."""
    path = tmp_path_factory.mktemp("frontier-in-tokens") / "rows.jsonl"
    with pytest.MonkeyPatch.context() as patched:
        layers = [replace(layer, attention_width=0) for layer in llama_engine.layer_shapes]
        patched.setattr(llama_engine, "layer_shapes", layers)
        rows = run(llama_engine, PLAN, rows_path=path, progress=silent)
    return {entry["cell"]: entry for entry in summarise(rows)}


def test_computation_is_counted(
    rows: list[dict[str, Any]], entries_in_tokens: dict[str, dict[str, Any]]
) -> None:
    """In documents, which are of one length but for a token or two: the instruction and query are apart."""
    entries = entries_in_tokens
    document = entries["direct-reuse:isolated"]["work"]["append"]

    def documents(cell: str, part: str) -> float:
        return float(entries[cell]["work"][part] / document)

    query = entries["direct-reuse:isolated"]["work"]["ask"]
    assert 0 < query < document * 2.5
    assert documents("direct-reuse:isolated", "slide") == 0
    assert documents("direct-reuse:stream:2", "slide") == 0
    assert documents("direct-reuse:stream:2", "append") == pytest.approx(3, rel=0.1)
    assert documents("epic@0.2:window:2+idle", "idle") == pytest.approx(2, rel=0.1), "two neighbours"
    assert documents("epic@0.2:window:2+idle", "slide") == 0
    assert documents("epic@0.2:window:2+idle", "append") == pytest.approx(1, rel=0.1)
    assert documents("document-aligned@0.2:window:2", "slide") == 0, "the edge was stored"
    assert documents("document-aligned@0.2:window:2", "append") == pytest.approx(3, rel=0.1)
    assert entries["token-topk@1:isolated"]["work"]["ask"] == pytest.approx(1, rel=0.1), "everything anew"
    assert documents("qcfuse@0.2:isolated", "append") > 1.5, "its anchors cost a pass as well"
    assert entries["preroll"]["work"]["slide"] == 0
    assert entries["preroll"]["work"]["ask"] == pytest.approx(query)
    assert documents("preroll", "idle") == pytest.approx(4, rel=0.25), "what is left of the window"
    assert documents("preroll", "append") == pytest.approx(1, rel=0.1)
    assert entries["batch:3"]["work"]["slide"] > 0
    held = [row["settings"][-2]["documents"] for row in rows]
    assert sorted(set(held)) == [5, 6, 7]
    assert all(held[n] + 1 == held[n + 1] or (held[n], held[n + 1]) == (7, 5) for n in range(3))


def test_exact_cells_agree(rows: list[dict[str, Any]]) -> None:
    for entry in summarise(rows):
        if entry["cell"] in ("token-topk@1:isolated", "batch:3", "preroll"):
            assert entry["answer_agreement"]["share"] == 1.0, entry["cell"]
            assert entry["kl"] == pytest.approx(0, abs=1e-6)
        elif entry["cell"] == "direct-reuse:isolated":
            assert entry["kl"] > 1e-3


def without_seconds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = json.loads(json.dumps(rows))
    for row in kept:
        row["full_prefill"].pop("ttft")
        for setting in row["settings"]:
            setting.pop("full_ttft")
            for cell in setting["cells"].values():
                cell.pop("ttft")
                cell.pop("select")
    return kept


def test_a_stopped_run_goes_on_to_the_same_rows(
    llama_engine: TransformersHost, tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    path = tmp_path / "rows.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(llama_engine, PLAN, rows_path=path, progress=stop)
    resumed = run(llama_engine, replace(PLAN, requests=3), rows_path=path, progress=silent)
    assert without_seconds(resumed) == without_seconds(rows[:3])
    longer = run(llama_engine, PLAN, rows_path=path, progress=silent)
    assert without_seconds(longer) == without_seconds(rows)
    assert run(llama_engine, replace(PLAN, requests=2), rows_path=path, progress=silent) == longer[:2]


def test_requests_that_full_prefill_gets_wrong_are_rolled_past(
    llama_engine: TransformersHost,
    tmp_path: Path,
    rows: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = [row["full_prefill"]["text"] for row in rows]
    wanted = {texts[1][:1], texts[3][:1]}
    monkeypatch.setattr(LabelledRequest, "is_right", lambda _, text: text[:1] in wanted)
    plan = replace(PLAN, answerable=True, requests=2, cells=PLAN.cells[:4])
    found = run(llama_engine, plan, rows_path=tmp_path / "rows.jsonl", progress=silent)
    right = [row["full_prefill"]["right"] for row in found]
    assert right == [text[:1] in wanted for text in texts[: len(found)]]
    assert sum(right) == 2
    assert right[-1]
    for ours, theirs in zip(found, rows, strict=False):
        assert ours["measured"] == ours["full_prefill"]["right"]
        assert ours["full_prefill"]["compared"] == (1 if ours["measured"] else 2)
        assert ours["rolled"] == theirs["rolled"][: len(ours["rolled"])], "the window rolls alike"
        assert [bool(one["cells"]) for one in ours["settings"]] == [ours["measured"]] * 3
    assert {entry["requests"] for entry in summarise(found)} == {2}
    never = replace(plan, requests=1)
    monkeypatch.setattr(LabelledRequest, "is_right", lambda *_: False)
    with pytest.raises(BenchError, match="answered 0 of 20 requests as expected; 1 were to be measured"):
        run(llama_engine, never, rows_path=tmp_path / "never.jsonl", progress=silent)


def test_a_window_is_asked_several_questions(
    llama_engine: TransformersHost,
    tmp_path: Path,
    rows: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = replace(PLAN, cells=PLAN.cells[:4], questions=3, requests=6)
    found = run(llama_engine, plan, rows_path=tmp_path / "all.jsonl", progress=silent)
    assert [(row["window"], row["number"]) for row in found] == [(w, n) for w in range(2) for n in range(3)]
    assert ["rolled" in row for row in found] == [True, False, False] * 2
    alone = rows[0]["rolled"][0]["append"]
    assert found[0]["rolled"][0]["append"] == pytest.approx(alone, rel=0.1), "rolling is as dear as ever"
    assert all(cell["ask"] > 0 for row in found for one in row["settings"] for cell in one["cells"].values())

    right = {row["full_prefill"]["text"] for row in (found[1], found[3])}
    monkeypatch.setattr(LabelledRequest, "is_right", lambda _, text: text in right)
    answered = [row["full_prefill"]["text"] in right for row in found]
    asked: list[str] = []
    reference = frontier_module.reference_of

    def counting(session: RollingSession, request: LabelledRequest, **options: Any) -> Reference:
        asked.append(request.query)
        return reference(session, request, **options)

    monkeypatch.setattr(frontier_module, "reference_of", counting)
    path = tmp_path / "answerable.jsonl"
    plan = replace(plan, answerable=True, requests=sum(answered))
    taken = run(llama_engine, plan, rows_path=path, progress=silent)
    assert [row["measured"] for row in taken] == answered[: len(taken)]
    assert len(asked) == sum(answered), "full prefill is asked only what one pass answers"
    for ours, theirs in zip(taken, found, strict=False):
        assert ours.get("rolled") == theirs.get("rolled")
        if ours["measured"]:
            assert ours["full_prefill"]["text"] == theirs["full_prefill"]["text"]
    entries = summarise(taken)
    assert {entry["requests"] for entry in entries} == {sum(answered)}
    assert entries[0]["work"]["append"] == fmean(row["rolled"][0]["append"] for row in taken[::3])


def test_a_longer_tail_costs_the_same_from_the_first_request_on(
    llama_engine: TransformersHost, tmp_path: Path
) -> None:
    plan = replace(PLAN, cells=(parse_cell("direct-reuse:window:1+tail3"),), requests=3)
    found = run(llama_engine, plan, rows_path=tmp_path / "rows.jsonl", progress=silent)
    costs = [row["rolled"][0] for row in found]
    rolled = [cost["append"] + cost["slide"] for cost in costs]
    assert max(rolled) == pytest.approx(min(rolled), rel=0.1)


def entry(cell: str, *, share: float, work: float) -> dict[str, Any]:
    agreement = {"share": share, "low": share, "high": share}
    parts = {"idle": 0.0, "append": 0.1, "slide": 0.0, "ask": work, "slide_and_ask": work}
    figures = {"top1": 1.0, "kl": 0.5, "speedup": 3.0}
    return {"cell": cell, "answer_agreement": agreement, "work": parts} | figures


def test_the_best_are_those_that_no_other_beats() -> None:
    entries = [
        entry("cheap", share=0.2, work=0.01),
        entry("beaten", share=0.5, work=0.2),
        entry("good", share=0.5, work=0.1),
        entry("twin", share=0.5, work=0.1),
        entry("exact", share=1.0, work=0.4),
    ]
    assert [one["cell"] for one in best(entries)] == ["cheap", "good", "twin", "exact"]
    lines = markdown(entries).splitlines()
    assert lines[2] == (
        "| **`exact`** | 1.00 (1.00 to 1.00) | 1.00 | 0.500 | 0.0% | 10.0% | 0.0% | 40.0% | 3.0x |"
    )
    assert "| `beaten` |" in "\n".join(lines)


def test_what_cannot_be_run_is_refused() -> None:
    cells = (parse_cell("epic@0.1:isolated"),)
    with pytest.raises(ConfigError, match="rolls: market"):
        FrontierRun(cells=cells, workload="needle", documents=4, requests=1)
    with pytest.raises(ConfigError, match="stream:15 at most"):
        FrontierRun((parse_cell("epic@0.1:stream:16"),), workload="market", documents=4, requests=1)
    with pytest.raises(ConfigError, match="requests is 0"):
        FrontierRun(cells=cells, workload="market", documents=4, requests=0)
    with pytest.raises(ConfigError, match="questions is 0"):
        FrontierRun(cells=cells, workload="market", documents=4, requests=1, questions=0)
    with pytest.raises(ConfigError, match="max_new_tokens is 0"):
        FrontierRun(cells=cells, workload="market", documents=4, requests=1, max_new_tokens=0)


def test_the_command_writes_report_table_and_plot(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = (
        "bench",
        "frontier",
        "--model",
        llama_folder,
        "--out",
        out,
        "--documents",
        4,
        "--requests",
        1,
    )
    arguments += ("--conditioning", "isolated", "--policy", "epic", "--policy", "qcfuse", "--ratio", 0.1)
    arguments += ("--cell", "batch:2", "--max-new-tokens", 3, "--all")
    assert command(monkeypatch, *arguments, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((out / "report.json").read_text())
    assert report["settings"]["max_new_tokens"] == 3
    assert [one["cell"] for one in report["entries"]] == [
        *("batch:2", "epic@0.1:isolated", "qcfuse@0.1:isolated"),
    ]
    assert report["full_prefill"]["right"]["count"] == 1
    assert (out / "frontier.png").read_bytes().startswith(b"\x89PNG")
    assert "`batch:2`" in (out / "table.md").read_text()
    assert command(monkeypatch, *arguments) == 0
    assert "sooner" in capsys.readouterr().out
