"""`rolling-kv replay` on a tiny model: workloads, traces, bounds with their exit code, and wrong input."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from rolling_kv import RollingSession
from rolling_kv.cli import main
from rolling_kv.engine.host import TransformersHost
from rolling_kv.workloads import LabelledRequest, write_requests

HISTORICAL, CONTRACT = "token-topk@0.05:first-seen", "document-aligned@0.05:window:3"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path | int) -> int:
    monkeypatch.setattr(sys, "argv", ["rolling-kv", "replay", *(str(argument) for argument in arguments)])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.fixture(scope="module")
def trace(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an agent recorded."""
    path = tmp_path_factory.mktemp("trace") / "run.jsonl"
    with RollingSession.open(model=llama_folder, window=2, trace=path) as session:
        for number in range(4):
            session.append(f"Note {number} says {number * 91}.")
            session.ask("Which one?", max_new_tokens=2)
    return path


def test_a_workload_is_replayed_and_bounds_decide_the_exit_code(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        *(
            "--model",
            llama_folder,
            "--window",
            3,
            "--requests",
            3,
            "--orders",
            3,
            "--max-new-tokens",
            6,
            "--seed",
            2,
        ),
        *("--out", tmp_path / "out", "--control", "repeat"),
    ]
    arms = f"{CONTRACT},full-prefill"
    assert run(monkeypatch, *arguments, "--arms", arms, "--max-variation", 0, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report["arms"]) == [CONTRACT, "full-prefill"]
    assert report["failed"] == []
    assert report["settings"]["orders"]["reversed"] == [2, 1, 0]
    assert (tmp_path / "out" / "report.html").exists()
    arms = f"{HISTORICAL},full-prefill"
    code = run(monkeypatch, *arguments, "--arms", arms, "--min-fidelity", 1.0, "--differences")
    shown = capsys.readouterr()
    below = [line for line in shown.err.splitlines() if line.startswith("failed: ")]
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()[1:]]
    full = {row["request"]: row["token_ids"] for row in rows if row["kind"] == "reference"}
    wrong = {
        row["order"]
        for row in rows
        if row.get("arm") == HISTORICAL
        and row["order"] != "repeat"
        and row["token_ids"] != full[row["request"]]
    }
    assert code == (3 if wrong else 0)
    assert wrong
    assert len(below) == len(wrong)
    assert all(line.startswith(f"failed: {HISTORICAL}, ") for line in below)
    answers: dict[int, set[tuple[int, ...]]] = {}
    for row in rows:
        if row.get("arm") == HISTORICAL and row["order"] != "repeat":
            answers.setdefault(row["request"], set()).add(tuple(row["token_ids"]))
    differing = [request for request in sorted(answers) if len(answers[request]) > 1]
    told = re.findall(rf"^{HISTORICAL}, request (\d+):$", shown.out, re.MULTILINE)
    assert list(map(int, told)) == differing != []
    assert shown.out.count("; the answers part at token ") == sum(len(one) - 1 for one in answers.values())


def test_workers_are_asked_for_and_told(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", llama_folder, "--window", 2, "--requests", 2, "--orders", 2, "--workers", 2]
    assert run(monkeypatch, *arguments, "--arms", CONTRACT, "--max-variation", 0) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "Up to 2 processes replayed at once, with 1 thread each: times" in told
    assert run(monkeypatch, *arguments[:-1], 0) == 1
    assert "--workers is 0; expected at least 1" in " ".join(capsys.readouterr().err.split())


def test_a_trace_is_replayed_under_its_own_settings(
    llama_folder: Path, trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, trace, "--max-variation", 0, "--orders", 3, "--json", "--differences") == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report["arms"]) == ["session"]
    assert report["requests"] == 4
    assert report["settings"]["model"]["name"] == str(llama_folder)
    cut = trace.with_name("cut.jsonl")
    cut.write_bytes(trace.read_bytes()[:-9])
    assert run(monkeypatch, cut, "--requests", 2, "--orders", "2", "--differences") == 0
    shown = capsys.readouterr()
    assert "the last line was cut off" in " ".join(shown.err.split())
    assert "No answer differs between orders." in shown.out


def test_a_file_of_requests_is_a_workload(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.jsonl"
    write_requests(
        path,
        [LabelledRequest((f"Note {n}.", f"Note {n + 1}."), "Well?", "", "", ()) for n in range(2)],
    )
    arguments = ("--workload", path, "--model", llama_folder, "--arms", CONTRACT, "--max-new-tokens", 2)
    assert run(monkeypatch, *arguments, "--orders", "reversed", "--json") == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", "topk"], "The arm 'topk' is not as expected"),
        (["--arms", ""], "The arm '' is not as expected"),
        (["--arms", "session"], "The arm 'session' takes the settings that were recorded"),
        (["--orders", "sideways"], "Unknown order 'sideways'"),
        (["--orders", "1", "--max-variation", "0"], "--max-variation compares orders, and there is one"),
        (["--orders", "1", "--differences"], "--differences compares orders, and there is one"),
        (["--max-variation", "2"], "--max-variation is 2; expected a share"),
        (["--min-fidelity", "-1"], "--min-fidelity is -1; expected a share"),
        (["--ratio", "7"], "ratio is 7.0"),
        (["--requests", "0"], "--requests is 0"),
        (["--window", "0"], "--window is 0"),
        (["--workload", "markets"], "Unknown labelled workload 'markets'"),
        (["--workload", "needle", "--detail", "long"], "--detail is that of market"),
        (["none.jsonl"], "none.jsonl cannot be read"),
        (["none.jsonl", "--window", "4"], "--window is that of a workload, and a trace was given"),
    ],
)
def test_wrong_input_is_named_before_anything_is_computed(
    llama_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    def computed(self: TransformersHost, *_: object) -> None:
        raise AssertionError("something was computed")

    monkeypatch.setattr(TransformersHost, "stock_prefill", computed)
    assert run(monkeypatch, *arguments, "--model", llama_folder) == 1
    assert message in " ".join(capsys.readouterr().err.split())


def test_another_model_than_the_trace_was_recorded_with_is_refused(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.tiny_models import tiny_model, tiny_tokenizer

    tiny_model("llama", seed=3).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    capsys.readouterr()
    assert run(monkeypatch, trace, "--model", tmp_path) == 1
    assert "TraceMismatchError" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib", "scipy"])
def test_a_missing_extra_is_named_before_anything_is_computed(
    llama_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    missing: str,
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setitem(sys.modules, f"{missing}.stats", None)
    assert run(monkeypatch, "--model", llama_folder, "--out", tmp_path / "out") == 1
    assert f"need {missing}" in " ".join(capsys.readouterr().err.replace("needs", "need").split())
    assert not (tmp_path / "out").exists()
