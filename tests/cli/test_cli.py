"""The command line on a tiny model: results, JSON, accounts, and errors with their exit codes."""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rolling_kv.cli import doctor as doctor_module
from rolling_kv.cli import main
from rolling_kv.cli.ask import ask
from rolling_kv.cli.options import _ARGUMENTS, as_options
from rolling_kv.cli.output import print_json
from rolling_kv.cli.units import parse_age, parse_size
from rolling_kv.errors import ConfigError
from rolling_kv.store.disk import DiskStore
from tests.store.samples import kv_of, lineage


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
        (("{notes}", "--window", "0"), "--window = 0: expected at least 1"),
        (("{notes}", "--dtype", "int4"), "Unknown dtype"),
        (("{notes}", "--model", "/nowhere"), "no model folder"),
        (("{notes}", "--max-new-tokens", "5000"), "or lower --max-new-tokens"),
        (("{notes}", "--answer-prefix", "\udcff"), "lone surrogate"),
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
        "--policy",
        "document-aligned",
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
    asked = ("ask", "Well?", notes, "--model", llama_folder, "--store", store, "--fresh-tail", "0")
    assert run(monkeypatch, *asked) == 0
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
    whole, total = shown("gc", store, "--max-age", "1d"), namespaces["default"]["bytes"]
    assert (whole["removed"], whole["kept"]) == ([], 4)
    would = shown("gc", store, "--max-bytes", str(total // 2), "--dry-run")
    assert len(shown("ls", store)["segments"]) == 4  # type: ignore[arg-type]
    did = shown("gc", store, "--max-bytes", str(total // 2))
    assert did == would | {"dry_run": False}
    assert did["freed"] > 0  # type: ignore[operator]
    left = shown("ls", store)["segments"]
    assert sum(segment["bytes"] for segment in left) == did["kept_bytes"] <= total // 2  # type: ignore[attr-defined]
    for command in ("ls", "stats", "verify", "rebuild", "gc --max-age 1d"):
        assert run(monkeypatch, "store", *command.split(), store) == 0
        assert capsys.readouterr().out.strip()
        assert run(monkeypatch, "store", *command.split(), tmp_path / "nothing") == 1
        assert "holds no store" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "nothing").exists()


def test_without_a_command_the_help_lists_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch)
    shown = capsys.readouterr().out
    assert all(command in shown for command in ("demo", "ask", "doctor", "store"))


def test_a_damaged_payload_does_not_end_a_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = DiskStore(tmp_path / "store")
    for number in range(3):
        store.put(lineage(number), kv_of(lineage(number)))
    store.close()
    (tmp_path / "store" / "segments" / lineage(0).key[:2] / f"{lineage(0).key}.safetensors").write_bytes(
        b"x" * 99
    )
    assert run(monkeypatch, "store", "ls", tmp_path / "store", "--long") == 0
    assert capsys.readouterr().out.count("damaged") == 1
    assert run(monkeypatch, "store", "ls", tmp_path / "store", "--long", "--json") == 0
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)["segments"]}
    assert "cannot be read" in rows[lineage(0).key]["damage"]
    assert rows[lineage(1).key]["provenance"] == lineage(1).describe()


def test_doctor_makes_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROLLING_KV_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "note.txt").write_text("mine", encoding="utf-8")
    assert run(monkeypatch, "doctor", "--store", folder) == 0
    assert "no store yet" in " ".join(capsys.readouterr().out.split())
    assert [path.name for path in folder.iterdir()] == ["note.txt"]


def test_doctor_compares_versions_with_what_the_distribution_declares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    declared = ["torch>=999", "absent-package>=1", "rich>=13", "absent-extra>=2; extra == 'bench'"]
    monkeypatch.setattr(doctor_module, "requires", lambda _name: declared)
    found = {finding.name: finding for finding in doctor_module._requirements()}
    assert {name: (one.status, one.needed) for name, one in found.items()} == {
        "torch": ("failed", True),
        "absent-package": ("missing", True),
        "rich": ("ok", True),
        "absent-extra": ("missing", False),
    }
    assert "needs >=999" in found["torch"].detail
    assert "rolling-kv[bench]" in found["absent-extra"].advice


def test_doctor_names_every_requirement_and_extra(tmp_path: Path) -> None:
    """Held against pyproject.toml itself."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    declared = [*project["dependencies"], *(one for name in extras if name != "dev" for one in extras[name])]
    names = {re.split("[<>=]", one)[0] for one in declared}
    assert {finding.name for finding in doctor_module._requirements()} == names


def test_standard_input_that_is_not_utf8_is_refused(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), errors="surrogateescape"))
    assert run(monkeypatch, "ask", "Well?", "-", "--model", llama_folder) == 1
    assert "Standard input is not UTF-8 text" in " ".join(capsys.readouterr().err.split())


def test_json_has_a_list_of_numbers_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    value = {
        "selected": [1, 2, 30],
        "text": "[\n  1,\n  2\n]",
        "names": ["a"],
        "none": [],
        "deep": [[1.5, -2e-07]],
    }
    print_json(value)
    shown = capsys.readouterr().out
    assert '"selected": [1, 2, 30],\n' in shown
    assert "[1.5, -2e-07]" in shown
    assert json.loads(shown) == value


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (
            "Open the session with window=3 or window_tokens=, or",
            "Open the session with --window 3 or --window-tokens, or",
        ),
        ("Pass store= a folder, or store=None to keep KV", "Pass --store a folder, or no --store to keep KV"),
        ("Use device='cpu'.", "Use --device cpu."),
        ("ratio is 2.0; expected a number", "--ratio is 2.0; expected a number"),
        (
            "These are not: window = 0: x; max_new_tokens = 1",
            "These are not: --window = 0: x; --max-new-tokens = 1",
        ),
        ("The window is full.", "The window is full."),
        ("Open another model.", "Open another model."),
        ("--steps is 0; expected", "--steps is 0; expected"),
    ],
)
def test_errors_name_options(message: str, shown: str) -> None:
    assert as_options(message) == shown


def test_every_argument_that_an_error_may_name_is_an_option() -> None:
    known = set(inspect.signature(ask).parameters)
    assert set(_ARGUMENTS.split("|")) <= known


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("2GiB", 2 * 1024**3), ("500MB", 500_000_000), ("1.5 kib", 1536), ("0", 0)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "age"), [("90s", 90), ("30m", 1800), ("12h", 43200), ("7d", 604_800), ("1.5w", 907_200)]
)
def test_ages(text: str, age: float) -> None:
    assert parse_age(text) == age


@pytest.mark.parametrize("text", ["", "much", "-1", "5 parsecs", "1e3", "7"])
def test_what_is_no_size_or_age(text: str) -> None:
    with pytest.raises(ConfigError, match="Expected a number and"):
        parse_age(text)
    if text != "7":
        with pytest.raises(ConfigError, match="for example 500MB or 2GiB"):
            parse_size(text)


def test_gc_without_a_bound_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "store", "gc", tmp_path) == 1
    assert "--max-bytes, --max-age or both" in " ".join(capsys.readouterr().err.split())


def test_an_old_python_leaves_no_environment_behind(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    for name in (
        "scripts/setup",
        "pyproject.toml",
        "constraints.txt",
        "integrations/langchain/pyproject.toml",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, tmp_path / name)
    old = tmp_path / "python-old"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.8.0 && exit 0\nexit 1\n', encoding="utf-8")
    old.chmod(0o755)
    done = subprocess.run(
        [tmp_path / "scripts/setup"], env=os.environ | {"PYTHON": str(old)}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "is Python 3.8.0. Name one: PYTHON=" in done.stderr
    assert not (tmp_path / ".venv").exists()
