"""`rolling-kv bench ttft` on a tiny model: what is measured, going on, and wrong input."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from rolling_kv.bench.layered import Layered
from rolling_kv.bench.memory import PeakMemory, anonymous_bytes
from rolling_kv.bench.rows import Rows
from rolling_kv.bench.ttft import TtftRun, require_fitting, run
from rolling_kv.bench.ttft_arms import parse_ttft_arm, parse_ttft_arms
from rolling_kv.bench.ttft_report import loading, markdown, percentile, summarise
from rolling_kv.bench.ttft_setups import SETUPS, Base
from rolling_kv.cli.app import app
from rolling_kv.config import session_config
from rolling_kv.engine.host import TransformersHost
from rolling_kv.errors import ConfigError, MissingExtraError, PromptTooLongError, RollingKVError
from rolling_kv.store import open_store

NAMES = ("document-aligned@0.1:isolated", "token-topk@0.1~0.5:window:3", "direct-reuse+pipeline:isolated")


def plan(**changes: Any) -> TtftRun:
    given = {"windows": (2,), "arms": parse_ttft_arms(NAMES), "setups": tuple(SETUPS), "requests": 2}
    return TtftRun(**(given | {"detail": "short"} | changes))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("document-aligned@0.05:isolated", "document-aligned@0.05:isolated"),
        ("token-topk", "token-topk@0.05:window:8"),
        ("document-aligned@0.1~0.25+pipeline:window:3", "document-aligned@0.1~0.25+pipeline:window:3"),
        ("direct-reuse", "direct-reuse:window:8"),
        ("epic@0.1+pipeline:isolated+tail1", "epic@0.1+pipeline:isolated+tail1"),
        ("sink-repair:document-aligned@0.2~0.5:isolated", "sink-repair:document-aligned@0.2~0.5:isolated"),
    ],
)
def test_arms_are_named_in_full(text: str, name: str) -> None:
    assert parse_ttft_arm(text).name == name
    assert parse_ttft_arm(name) == parse_ttft_arm(text)


@pytest.mark.parametrize(
    "text",
    ["full-prefill", "session", "document-aligned~0", "document-aligned~x", "epic~0.5", "nothing", "epic@2"],
)
def test_what_is_no_arm_is_refused(text: str) -> None:
    with pytest.raises(RollingKVError):
        parse_ttft_arm(text)


def test_arms_are_named_once() -> None:
    with pytest.raises(ConfigError, match="named twice"):
        parse_ttft_arms(["token-topk", "token-topk@0.05"])


def test_every_side_is_measured_and_a_run_goes_on(llama_engine: TransformersHost, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = run(llama_engine, plan(), rows_path=path, progress=lambda *_: None)
    assert [(row["window"], row["request"]) for row in rows] == [(2, 0), (2, 1), (2, 2)]
    sides = {f"{name} {setup}" for name in NAMES for setup in SETUPS}
    assert set(rows[1]["measured"]) == sides | {"full-prefill"}
    assert {name for name in rows[2]["measured"] if name.endswith(" cold")} == set()
    assert rows[1]["order"][0] == "full-prefill" == rows[2]["order"][-1]
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:40])  # killed while it wrote the last row
    again = run(llama_engine, plan(), rows_path=path, progress=lambda *_: None)
    assert again[:2] == rows[:2]
    assert [list(row["measured"]) for row in again] == [list(row["measured"]) for row in rows]
    for ours, theirs in zip(again, rows, strict=True):
        for name, one in ours["measured"].items():
            assert one["first_token"] == theirs["measured"][name]["first_token"]


def test_setups_are_what_they_say(llama_engine: TransformersHost, tmp_path: Path) -> None:
    rows = run(llama_engine, plan(requests=1), rows_path=tmp_path / "rows.jsonl", progress=lambda *_: None)
    measured = rows[1]["measured"]
    for name in NAMES:
        by_setup = {setup: measured[f"{name} {setup}"] for setup in SETUPS}
        assert by_setup["append"]["ingested"] == by_setup["disk-append"]["ingested"] == 0
        assert (by_setup["idle"]["idle_computed"] > 0) == name.endswith("window:3")
        new = by_setup["ask"]["ingested"]
        assert new == by_setup["disk-ask"]["ingested"] == by_setup["warm"]["ingested"] > 0
        assert by_setup["cold"]["ingested"] > new
        assert len({(one["first_token"], one["recomputed"]) for one in by_setup.values()}) == 1
    moved = measured["direct-reuse+pipeline:isolated append"]
    stored = moved["prompt_tokens"] - moved["computed"]
    assert moved["kv_bytes_moved"] == stored * 2 * 6 * 2 * 16 * 4, "keys, layers, heads, dimensions, bytes"


def test_a_fresh_tail_is_computed_by_the_call(llama_engine: TransformersHost, tmp_path: Path) -> None:
    arms = parse_ttft_arms(["direct-reuse:isolated", "direct-reuse:isolated+tail1"])
    measured = run(
        llama_engine,
        plan(arms=arms, setups=("append",), requests=1),
        rows_path=tmp_path / "rows.jsonl",
        progress=lambda *_: None,
    )[1]["measured"]
    stored, fresh = (measured[f"{arm.name} append"] for arm in arms)
    assert fresh["computed"] > stored["computed"] + 5, "the newest document as well"
    assert fresh["prompt_tokens"] == stored["prompt_tokens"]


def test_a_base_is_not_changed_by_what_is_measured(llama_engine: TransformersHost) -> None:
    base = Base(llama_engine, session_config(window=2, conditioning="isolated"), disk=True)
    try:
        base.hold(["one document", "another document"])
        held = len(base.store)
        for name in ("disk-ask", "disk-append", "warm"):
            with base.session(SETUPS[name], ["one document", "another document"]) as session:
                session.append("a third document")
                assert session.ask("Which?", max_new_tokens=1).usage.degraded == ()
        assert len(base.store) == held
        found = base.loading(["one document", "another document"])
        assert min(found.values()) > 0
    finally:
        base.close()


def test_layers_of_stores(llama_engine: TransformersHost) -> None:
    bottom, top = open_store(None), open_store(None)
    layered = Layered(bottom, top)
    assert len(layered) == 0
    assert layered.check_integrity() == []


def test_the_summary_by_hand() -> None:
    def one(seconds: float, **more: Any) -> dict[str, Any]:
        phases = dict.fromkeys(("ingest", "load", "select", "fuse", "first_token"), seconds / 5)
        given = {"ttft": seconds, "phases": phases, "prompt_tokens": 10, "first_token": 3, "degraded": []}
        given |= {"recomputed": 1, "segments": 1, "kv_bytes_moved": 8, "memory": None}
        return given | {"append_seconds": 0.5, "arm": "a", "setup": "ask"} | more

    load = {"bytes": 100, "seconds": 2.0, "memmap_seconds": 1.0}
    rows = [
        {"window": 2, "request": n, "measured": {"a ask": one(f), "full-prefill": one(t)}, "loading": [load]}
        for n, (f, t) in enumerate([(9.0, 9.0), (1.0, 8.0), (2.0, 8.0), (4.0, 8.0)])
    ]
    rows[0]["measured"]["full-prefill"]["multiplications"] = 40
    rows[0]["measured"]["a ask"]["multiplications"] = 5
    full, arm = summarise(rows)
    assert arm["fewer_multiplications"] == 8.0
    assert (full["side"], full["sooner"]["median"]) == ("full-prefill", 1.0)
    assert arm["ttft"] == {"median": 2.0, "p95": 4.0, "all": [1.0, 2.0, 4.0]}
    assert arm["sooner"] == {"median": 4.0, "lowest": 2.0, "highest": 8.0}
    assert (arm["same_first_token"], arm["append"], arm["requests"]) == (3, 0.5, 3)
    assert loading(rows)[0]["share"] == 0.5
    assert "| `a` | ask | 2.000 (4.000) | 4.0 (2.0 to 8.0) | 8.0x |" in markdown([full, arm])


def test_percentiles_are_nearest_ranks() -> None:
    values = [float(n) for n in range(1, 21)]
    assert [percentile(values, share) for share in (0.0, 0.05, 0.5, 0.95, 1.0)] == [1, 1, 10, 19, 20]
    assert percentile([7.0], 0.95) == 7.0


def test_a_window_that_does_not_fit_is_named_first(llama_engine: TransformersHost) -> None:
    with pytest.raises(PromptTooLongError, match=r"--window 84 .* 2048 positions"):
        require_fitting(llama_engine, plan(windows=(2, 84), detail="long"))


def test_peak_memory_sees_what_came_and_went() -> None:
    gc.collect()  # or what earlier tests left goes in the middle of this one
    before = anonymous_bytes()
    with PeakMemory() as watched:
        torch.ones(40_000_000)
        watched._ended.wait(0.1)
        held = torch.ones(20_000_000)
        watched._ended.wait(0.1)
    assert watched.peak >= before + 0.9 * held.numel() * 4


def test_the_command(llama_folder: Path, tmp_path: Path) -> None:
    options = [
        "--model",
        str(llama_folder),
        "--window",
        "2",
        "--window",
        "3",
        "--requests",
        "1",
        "--detail",
        "short",
    ]
    options += ["--arm", "document-aligned@0.1:isolated", "--setup", "append", "--setup", "warm"]
    made = CliRunner().invoke(app, ["bench", "ttft", "--out", str(tmp_path), "--json", *options])
    assert made.exit_code == 0, made.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert [(entry["window"], entry["setup"]) for entry in report["entries"]] == [
        (size, setup) for size in (2, 3) for setup in (None, "append", "warm")
    ]
    memory = [entry["memory"] for entry in report["entries"]]  # of a process that ran other tests before
    assert all(one["peak"] > 0 and one["before_model"] > 0 for one in memory)
    assert all(entry["fewer_multiplications"] >= 1 for entry in report["entries"])
    assert report["weight_bytes"] > 0
    assert (tmp_path / "ttft-window.png").stat().st_size > 1000
    assert "document-aligned@0.1:isolated" in (tmp_path / "table.md").read_text()
    changed = CliRunner().invoke(app, ["bench", "ttft", "--out", str(tmp_path), *options, "--seed", "3"])
    assert changed.exit_code != 0
    assert "other settings (seed)" in str(changed.exception)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--requests", "0"], "--requests is 0"),
        (["--window", "1"], "--window is 1"),
        (["--setup", "hot"], "--setup is 'hot'"),
        (["--arm", "full-prefill"], "reuses nothing"),
        (["--llama-cpp", "nowhere.gguf"], "no such file"),
    ],
)
def test_wrong_input_is_named(tmp_path: Path, options: list[str], message: str) -> None:
    made = CliRunner().invoke(app, ["bench", "ttft", "--out", str(tmp_path / "out"), *options])
    assert isinstance(made.exception, ConfigError)
    assert message in str(made.exception)
    assert not (tmp_path / "out").exists()


def test_llama_cpp_must_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rolling_kv.bench import llama_cpp

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(llama_cpp, "import_module", missing)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(MissingExtraError, match="pip install llama-cpp-python"):
        llama_cpp.LlamaCpp(tmp_path / "model.gguf", positions=10, threads=1)


def test_rows_of_another_run_are_refused(llama_engine: TransformersHost, tmp_path: Path) -> None:
    with Rows(tmp_path / "rows.jsonl", settings={"kind": "policies"}):
        pass
    with pytest.raises(RollingKVError, match="other settings"):
        run(llama_engine, plan(), rows_path=tmp_path / "rows.jsonl", progress=lambda *_: None)
