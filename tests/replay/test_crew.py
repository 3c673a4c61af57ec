"""Replaying in several processes: the same rows as in one, and what happens when a process does not work."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from multiprocessing import active_children
from pathlib import Path

import pytest
import torch

from rolling_kv.engine import load_engine
from rolling_kv.engine.host import TransformersHost
from rolling_kv.errors import BenchError, ConfigError, ModelNotFoundError
from rolling_kv.replay import crew
from rolling_kv.replay.crew import Workers, share_out
from rolling_kv.replay.runner import replay
from tests.replay.test_runner import market, run_of, without_seconds

ARMS = ("token-topk:first-seen", "document-aligned@0.2:window:1", "full-prefill")


@pytest.fixture(scope="module")
def engine(llama_folder: Path) -> TransformersHost:
    return load_engine(llama_folder, dtype="float32", device="cpu")


def workers(folder: Path, count: int = 2) -> Workers:
    return Workers(count, 1, partial(load_engine, folder, dtype="float32", device="cpu"))


def test_processes_measure_what_one_does(
    engine: TransformersHost, llama_folder: Path, tmp_path: Path
) -> None:
    """And so an answer is the same in another process: KV, logits and all."""
    run = run_of(*ARMS, orders="chronological,reversed", controls=("repeat", "reset"))
    shown: list[tuple[int, int, str]] = []
    many = replay(
        engine,
        market(),
        run,
        out=tmp_path,
        workers=workers(llama_folder),
        progress=lambda *report: shown.append(report),
    )
    assert without_seconds(many) == without_seconds(replay(engine, market(), run))
    assert shown[-1] == (48, 48, "done")
    assert [done for done, _, _ in shown] == sorted(done for done, _, _ in shown)
    assert not active_children()
    # a run that goes on has nothing to do, and starts nobody
    nobody = Workers(2, 1, partial(load_engine, tmp_path / "nothing"))
    assert replay(engine, market(), run, out=tmp_path, workers=nobody) == many


def test_a_killed_worker_ends_the_run_and_keeps_its_rows(
    engine: TransformersHost, llama_folder: Path, tmp_path: Path
) -> None:
    run = run_of(*ARMS, orders="2")

    def kill(done: int, total: int, what: str) -> None:
        if done == 6:
            for process in active_children():
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)

    with pytest.raises(BenchError, match=r"(?s)worker process ended before its work.*fewer --workers"):
        replay(engine, market(), run, out=tmp_path, workers=workers(llama_folder), progress=kill)
    assert not active_children()
    kept = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()[1:]]
    assert len(kept) >= 6
    resumed = replay(engine, market(), run, out=tmp_path, workers=workers(llama_folder))
    assert without_seconds(resumed) == without_seconds(replay(engine, market(), run))


def test_what_a_worker_raises_reaches_the_caller(engine: TransformersHost, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no model folder"):
        replay(engine, market(), run_of(*ARMS), workers=workers(tmp_path / "nothing"))
    assert not active_children()


def test_a_worker_with_another_model_is_refused(engine: TransformersHost, llama_folder: Path) -> None:
    other = Workers(1, 1, partial(load_engine, llama_folder, dtype="bfloat16", device="cpu"))
    with pytest.raises(BenchError, match=r"was another one when a worker opened it.*--workers 1"):
        replay(engine, market(), run_of(*ARMS), workers=other)


def test_an_error_that_cannot_be_sent_is_sent_as_text() -> None:
    class Local(Exception):
        pass

    sent = crew._portable(Local("why"))
    assert isinstance(sent, BenchError)
    assert str(sent) == "Local: why"
    original = ConfigError("as it is")
    assert crew._portable(original) is original


@pytest.mark.parametrize(
    ("threads", "asked", "passes", "free", "expected"),
    [
        (8, None, 20, 100, (8, 1)),
        (8, None, 3, 100, (3, 2)),
        (8, None, 20, 2, (2, 4)),
        (8, None, 20, 0, (1, 8)),
        (1, None, 20, 100, (1, 1)),
        (2, 5, 20, 0, (5, 1)),
        (8, 5, 2, 0, (2, 4)),
    ],
)
def test_threads_are_shared_out(
    engine: TransformersHost,
    monkeypatch: pytest.MonkeyPatch,
    threads: int,
    asked: int | None,
    passes: int,
    free: int,
    expected: tuple[int, int],
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(crew, "_free_bytes", lambda: free * 3 * engine.weight_bytes)
    assert share_out(engine, asked=asked, passes=passes) == expected


def test_no_workers_are_refused(engine: TransformersHost) -> None:
    with pytest.raises(ConfigError, match="--workers is 0; expected at least 1"):
        share_out(engine, asked=0, passes=2)


def test_free_memory_is_what_the_system_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert crew._free_bytes() > 1 << 20
    monkeypatch.setattr(crew, "_MEMINFO", tmp_path / "nothing")
    assert crew._free_bytes() == 0
