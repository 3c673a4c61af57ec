"""`bench policies`: arms, going on after a stop, summaries by hand, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rolling_kv.bench.policies import PoliciesRun, default_policies, markdown, run, summarise
from rolling_kv.bench.requests import parse_documents, requests_of
from rolling_kv.engine.host import TransformersHost
from rolling_kv.errors import ConfigError, UnknownWorkloadError
from rolling_kv.policies import POLICIES
from rolling_kv.workloads import LABELLED, write_requests
from tests.bench.commands import command

PLAN = PoliciesRun(
    workloads=("needle", "market"),
    policies=("document-aligned", "direct-reuse"),
    ratios=(0.1, 0.4),
    documents=(4, 6),
    requests=2,
    max_new_tokens=3,
)


def silent(done: int, total: int, what: str) -> None:
    """Takes no notice."""


def without_seconds(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept = json.loads(json.dumps(rows))
    for row in kept:
        for one in (row["full_prefill"], *row["arms"].values()):
            one.pop("ttft")
            one.pop("select", None)
    return kept


def test_all_policies_are_compared_at_equal_budgets() -> None:
    covered = {name.partition(":")[0] for name in default_policies()}
    assert covered == set(POLICIES) - {"full-prefill"}
    arms = PoliciesRun().arms()
    assert len({arm.name for arm in arms}) == len(arms)
    assert [arm.ratio for arm in arms if arm.policy == "direct-reuse"] == [0.0]
    close = PoliciesRun(ratios=(0.12, 0.125, 0.005)).arms()
    assert len({arm.name for arm in close}) == len(close)
    assert [arm.ratio for arm in arms if arm.policy == "epic"] == [0.05, 0.1, 0.2, 0.3, 0.5]


def test_a_stopped_run_goes_on_to_the_same_rows(llama_engine: TransformersHost, tmp_path: Path) -> None:
    whole = run(llama_engine, PLAN, rows_path=tmp_path / "whole.jsonl", progress=silent)

    def stop(done: int, total: int, what: str) -> None:
        assert total == 4
        if done == 3:
            raise KeyboardInterrupt

    path = tmp_path / "stopped.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(llama_engine, PLAN, rows_path=path, progress=stop)
    seen: list[int] = []
    resumed = run(llama_engine, PLAN, rows_path=path, progress=lambda done, *_: seen.append(done))
    assert seen == [3, 4]
    assert without_seconds(resumed) == without_seconds(whole)
    assert {(row["workload"], row["request"]) for row in whole} == {
        (name, n) for name in PLAN.workloads for n in range(2)
    }
    assert all(len(row["arms"]) == 3 for row in whole)


def outcome(*, agrees: bool, kl: float, ttft: float, recall: float | None) -> dict[str, Any]:
    return {
        "policy": "epic",
        "ratio": 0.1,
        "agrees": agrees,
        "top1": 0.5,
        "kl": kl,
        "recall": recall,
        "captured_deviation": None,
        "segments": 3,
        "select": 0.1,
        "ttft": ttft,
        "degraded": (),
    }


def test_a_summary_by_hand() -> None:
    rows = [
        {
            "workload": "needle",
            "full_prefill": {"ttft": 4.0, "right": n < 2},
            "arms": {"epic 10%": outcome(agrees=n > 0, kl=0.1 * n, ttft=1.0 + n, recall=None if n else 0.5)},
        }
        for n in range(3)
    ]
    [entry] = summarise(rows)
    assert entry["answer_agreement"]["hits"] == 2
    assert entry["kl"] == pytest.approx(0.1)
    assert entry["recall"] == 0.5, "requests without labels behind the exact prefix do not count"
    assert entry["captured_deviation"] is None
    assert entry["ttft_seconds"] == 2.0
    assert entry["speedup"] == 2.0, "the median of 4, 2 and 4/3"
    assert markdown([entry], workload="needle").splitlines() == [
        "| policy | 10% |",
        "|---|---|",
        "| `epic` | 0.67 (0.21 to 0.94), where right 1 of 2, KL 0.100, recall 0.50 |",
    ]


def test_numbers_of_documents_vary_within_a_range() -> None:
    sizes = [len(r.documents) for r in requests_of("needle", seed=3, documents=(4, 9), count=60)]
    assert set(sizes) == {4, 5, 6, 7, 8, 9}
    rolling = requests_of("market", seed=3, documents=(4, 9), count=3)
    assert [len(r.documents) for r in rolling] == [9, 9, 9]
    assert rolling[0].documents[1:] == rolling[1].documents[:-1]
    for text in ("", "0", "3-", "9-4", "x", "-3"):
        with pytest.raises(ConfigError, match="16-32"):
            parse_documents(text)
    with pytest.raises(UnknownWorkloadError, match="needle"):
        requests_of("haystack", seed=0, documents=(1, 1), count=1)


def test_the_command_writes_report_table_and_plot(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.jsonl"
    write_requests(own, [next(LABELLED.create("needle")(1, documents=4))])
    out = tmp_path / "out"
    arguments = ("bench", "policies", "--model", llama_folder, "--out", out, "--workload", "multi-query")
    arguments += ("--workload", own, "--policy", "epic", "--policy", "qcfuse", "--ratio", "0.2")
    arguments += ("--requests", 1, "--documents", "5", "--conditioning", "window:2")
    assert command(monkeypatch, *arguments, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((out / "report.json").read_text())
    assert [(e["workload"], e["policy"], e["requests"]) for e in report["entries"]] == [
        (workload, policy, count)
        for workload, count in (("multi-query", 1), (str(own), 1), ("all", 2))
        for policy in ("epic", "qcfuse")
    ]
    assert report["full_prefill"]["multi-query"]["requests"] == 1
    assert "guessed" in report["critical_layers"]["source"]
    assert (out / "quality-ttft.png").read_bytes().startswith(b"\x89PNG")
    assert "| `epic` |" in (out / "table.md").read_text()
    assert command(monkeypatch, *arguments) == 0, "all rows are there already"
    assert "answers equal to full prefill's" in capsys.readouterr().out
    assert command(monkeypatch, *arguments, "--seed", 3) == 1
    assert "other settings (seed" in " ".join(capsys.readouterr().err.split())
