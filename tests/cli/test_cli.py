"""The command line on a tiny model: results, JSON, accounts, and errors with their exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rolling_kv.cli import main


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_text(f"Note {number} says {number * 91}.\n", encoding="utf-8")
    (folder / "ignored.bin").write_bytes(b"\xff\xfe")
    return folder


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["rolling-kv", *(str(argument) for argument in arguments)])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_ask_prints_the_answer_and_accounts_for_it(
    llama_folder: Path, notes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "ask", "Well?", notes, "--model", llama_folder, "--max-new-tokens", "4") == 0
    shown = capsys.readouterr()
    assert shown.out.strip()
    assert "4 documents" in shown.err
    assert "recomputed" in shown.err


def test_ask_as_json_reuses_the_store(
    llama_folder: Path,
    notes: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers = []
    for _ in range(2):
        store = ("--store", tmp_path / "store")
        model = ("--model", llama_folder, "--max-new-tokens", "4")
        assert run(monkeypatch, "ask", "Well?", notes, *model, *store, "--window", "3", "--json") == 0
        answers.append(json.loads(capsys.readouterr().out))
    first, second = answers
    assert first["text"] == second["text"]
    assert first["ingest"]["computed"] > 0
    assert second["ingest"]["computed"] == 0
    assert len(second["documents"]) == 3
    assert second["ingest"]["evicted"] == [str(notes / "0.txt")]
    usage = second["usage"]
    assert (
        sum(usage[part] for part in ("prefix", "reused", "recomputed", "computed")) == usage["prompt_tokens"]
    )


def test_ask_reads_lines_from_standard_input(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("first\n\nsecond\nfirst\n"))
    assert run(monkeypatch, "ask", "Well?", "-", "--lines", "--model", llama_folder, "--json") == 0
    assert json.loads(capsys.readouterr().out)["documents"] == ["stdin:1", "stdin:3", "stdin:4"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("{notes}/missing.txt",), "There is no file or folder"),
        (("{notes}/ignored.bin",), "is not UTF-8 text"),
        (("{empty}",), "no document to ask about"),
        (("{notes}", "--policy", "magic"), "Known ones: direct-reuse"),
        (("{notes}", "--ratio", "2"), "from 0"),
        (("{notes}", "--conditioning", "window"), "window:k"),
        (("{notes}", "--window", "0"), "at least 1"),
        (("{notes}", "--dtype", "int4"), "Unknown dtype"),
        (("{notes}", "--model", "/nowhere"), "no model folder"),
        (("{notes}", "--max-new-tokens", "5000"), "positions"),
    ],
)
def test_ask_says_what_is_wrong(
    llama_folder: Path,
    notes: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    says: str,
) -> None:
    (tmp_path / "empty").mkdir()
    given = [argument.format(notes=notes, empty=tmp_path / "empty") for argument in arguments]
    model = [] if "--model" in given else ["--model", str(llama_folder)]
    assert run(monkeypatch, "ask", "Well?", *given, *model) == 1
    shown = capsys.readouterr()
    assert says in " ".join(shown.err.split())
    assert "Traceback" not in shown.err
    assert shown.out == ""


def test_demo_as_json(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "demo", "--model", llama_folder, "--window", "4", "--steps", "3", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert len(shown["steps"]) == shown["summary"]["steps"] == 3
    for step in shown["steps"]:
        usage = step["usage"]
        assert sum(usage[p] for p in ("prefix", "reused", "recomputed", "computed")) == usage["prompt_tokens"]
        assert len(step["evicted"]) == 1
        assert step["full_prefill_ttft"] > 0
        assert step["timing"]["ttft"] > 0
        assert step["agrees"] == (step["answer"] == step["full_prefill_answer"])
    agreement = sum(step["agrees"] for step in shown["steps"]) / 3
    assert shown["summary"]["agreement"] == agreement
    assert shown["summary"]["ttft_speedup_median"] == sorted(step["speedup"] for step in shown["steps"])[1]


def test_demo_at_ratio_one_agrees_and_says_so(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        "--model",
        llama_folder,
        "--window",
        "4",
        "--steps",
        "2",
        "--ratio",
        "1",
        "--dtype",
        "float32",
    )
    assert run(monkeypatch, "demo", *arguments) == 0
    lines = capsys.readouterr().out.split("\n")
    assert "2 of 2 answers equal full prefill's" in " ".join(" ".join(lines).split())


def test_doctor_reports_and_sets_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROLLING_KV_CACHE", str(tmp_path / "cache"))
    assert run(monkeypatch, "doctor", "--json", "--store", tmp_path / "store") == 0
    report = json.loads(capsys.readouterr().out)
    names = {finding["name"]: finding for finding in report["findings"]}
    assert report["ok"]
    assert names["torch"]["status"] == "ok"
    assert names["model smollm2"]["detail"].startswith("installed")
    assert names["kernels"]["status"] == "ok"
    monkeypatch.setenv("ROLLING_KV_KERNELS", "fast")
    assert run(monkeypatch, "doctor") == 1
    assert "expected 'torch' or 'triton'" in " ".join(capsys.readouterr().out.split())
    monkeypatch.delenv("ROLLING_KV_KERNELS")
    (tmp_path / "file").write_text("not a folder", encoding="utf-8")
    assert run(monkeypatch, "doctor", "--store", tmp_path / "file") == 1
    assert "store" in capsys.readouterr().out.splitlines()[-1]


def test_store_commands(
    llama_folder: Path,
    notes: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = tmp_path / "store"
    assert run(monkeypatch, "ask", "Well?", notes, "--model", llama_folder, "--store", store) == 0
    capsys.readouterr()

    def shown(*arguments: str | Path, code: int = 0) -> dict[str, object]:
        assert run(monkeypatch, "store", *arguments, "--json") == code
        return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]

    segments = shown("ls", store, "--long")["segments"]
    assert isinstance(segments, list)
    assert len(segments) == 5, "the frame of the template, and four documents"
    assert segments[0]["provenance"]["namespace"] == "default"
    namespaces = shown("stats", store)["namespaces"]
    assert isinstance(namespaces, dict)
    assert namespaces["default"]["segments"] == 5
    assert namespaces["default"]["bytes"] == sum(segment["bytes"] for segment in segments)
    assert shown("verify", store)["problems"] == []
    damaged = next(store.rglob("*.safetensors"))
    damaged.write_bytes(b"x" * 100)
    assert len(shown("verify", store, code=1)["problems"]) == 1  # type: ignore[arg-type]
    assert shown("rebuild", store)["indexed"] == 4
    assert shown("verify", store)["problems"] == []
    for command in ("ls", "stats", "verify", "rebuild"):
        assert run(monkeypatch, "store", command, store) == 0
        assert capsys.readouterr().out.strip()
        assert run(monkeypatch, "store", command, tmp_path / "nothing") == 1
        assert "holds no store" in capsys.readouterr().err
    assert not (tmp_path / "nothing").exists()


def test_without_a_command_the_help_lists_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch)
    shown = capsys.readouterr().out
    assert all(command in shown for command in ("demo", "ask", "doctor", "store"))
