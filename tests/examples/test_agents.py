"""The example agents, each run as it stands, with a tiny model in a folder instead of a demo model."""

from __future__ import annotations

import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_models import tiny_model, tiny_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-model")
    tiny_model("llama", max_position_embeddings=16384).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def run(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs an example in this process; what it and the processes that it started printed."""

    def run_example(name: str, *arguments: str) -> str:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setattr(sys, "argv", [name, "--model", str(model), *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capfd.readouterr().out

    return run_example


def test_market_watch(run: Callable[..., str]) -> None:
    printed = run("market_watch.py", "--steps", "3", "--window", "5")
    accounts = re.findall(
        r"of (\d+) prompt tokens (\d+) were exact prefix, (\d+) reused, (\d+) recomputed, (\d+) new", printed
    )
    assert len(accounts) == printed.count("\n+ ") + 1 == 3
    for total, *parts in accounts:
        assert sum(map(int, parts)) == int(total)
        assert int(parts[0]) + int(parts[1]) > 0.5 * int(total)


def test_research_notes(run: Callable[..., str], tmp_path: Path) -> None:
    printed = run("research_notes.py")
    changes = re.findall(r"^([+~-]) (\w+)\.txt: (\d+) tokens computed$", printed, flags=re.MULTILINE)
    assert [(kind, name) for kind, name, _ in changes] == [
        *(("+", name) for name in ("boiler", "pump", "turbine", "valve")),
        ("-", "valve"),
        ("~", "boiler"),
        ("+", "fan"),
    ]
    assert int(changes[4][2]) == 0, "what is gone costs nothing"
    assert printed.count("prompt tokens were not computed again") == 2
    (tmp_path / "only.txt").write_text("The only note.", encoding="utf-8")
    printed = run("research_notes.py", str(tmp_path), "What is this?")
    assert printed.startswith("+ only.txt: ")
    assert "\nWhat is this?\n" in printed


def test_langchain_agent_goes_on_after_a_restart(run: Callable[..., str]) -> None:
    """Each half of the conversation is a process of its own."""
    printed = run("langchain_agent.py")
    first, second = printed.split("A new process.\n")[1:]
    assert first.count("closing_price({'company': '") == 2
    assert second.count("closing_price({'company': '") == 1
    accounts = re.findall(
        r"(\d+) prompt tokens: KV of (\d+) was there and kept, of (\d+) was stored", first + second
    )
    assert len(accounts) == 6
    total, kept, _ = map(int, accounts[4])
    assert total > int(accounts[3][0]), "the conversation went on"
    assert kept > 0.6 * total, "from disk"


def test_determinism_check(run: Callable[..., str], tmp_path: Path) -> None:
    """The control shows that the check can find what it looks for."""
    out = tmp_path / "out"
    printed = run("determinism_check.py", "--window", "4", "--requests", "4", "--out", str(out))
    accounts = re.findall(
        r"^request \d: .* \((\d+) of (\d+) prompt tokens were reused\)$", printed, re.MULTILINE
    )
    assert len(accounts) == 4
    assert all(int(kept) > 0.5 * int(total) for kept, total in accounts)
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    session, control = report["arms"].values()
    assert session["variation"]["hits"] == 0
    assert control["variation"]["hits"] > 0
    assert "history: their KV differs first at layer" in printed
    assert (out / "report.html").exists()
    with pytest.raises(SystemExit):
        run("determinism_check.py", "--out", str(out))
