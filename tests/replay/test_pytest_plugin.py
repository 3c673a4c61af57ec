"""The pytest plugin, in runs of pytest of its own: what passes, what fails and how, and what is refused."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
AGENT = """
import pytest
from rolling_kv import RollingSession
from rolling_kv.engine.host import TransformersHost
from tests.tiny_models import tiny_model, tiny_tokenizer

@pytest.fixture(scope="module")
def engine():
    return TransformersHost(tiny_model("llama"), tiny_tokenizer(), name="tiny-llama")

def agent(session, requests=3):
    for number in range(requests + 2):
        session.append(f"Note {number} of the day says {number * 7919 % 1000}.", id=f"obs-{number}")
        if number > 1:
            session.ask(f"What did note {number} say?", max_new_tokens=8)

HISTORICAL = {"policy": "token-topk", "ratio": 0.05, "conditioning": "first-seen", "deterministic": False}
REUSE = {"policy": "direct-reuse", "conditioning": "isolated"}
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name in ("CI", "BUILD_NUMBER", "PYTEST_ADDOPTS"):  # with CI, pytest prints whole messages once more
        monkeypatch.delenv(name, raising=False)
    pytester.syspathinsert(ROOT)
    return pytester


def outcome(run: pytest.Pytester, source: str) -> pytest.RunResult:
    run.makepyfile(AGENT + source)
    return run.runpytest_inprocess(
        "-p", "pytest_rolling_kv", "-p", "no:cacheprovider", "-W", "default", "--strict-markers"
    )


def test_a_deterministic_agent_passes(run: pytest.Pytester) -> None:
    result = outcome(
        run,
        """
@pytest.mark.replay_determinism(orders=("reversed", "random:1"), max_variation=0.0)
def test_agent(rolling_replay, engine):
    with rolling_replay.session(model=engine, window=3, conditioning="window:1") as session:
        agent(session)

def test_fixture_alone(rolling_replay, engine):
    with rolling_replay.session(model=engine, window=3, conditioning="isolated") as session:
        agent(session, requests=2)

def test_neither():
    pass
""",
    )
    result.assert_outcomes(passed=3)


def test_answers_that_depend_on_history_fail_and_say_where(run: pytest.Pytester) -> None:
    result = outcome(
        run,
        """
@pytest.mark.replay_determinism(orders=("reversed", "random:1"))
def test_agent(rolling_replay, engine):
    with rolling_replay.session(model=engine, window=3, **HISTORICAL) as session:
        agent(session)
""",
    )
    result.assert_outcomes(failed=1)  # and no error at teardown
    result.stdout.re_match_lines(
        [
            r"A session \(tiny-llama, token-topk, first-seen\), 3 requests in the orders chronological, "
            r"reversed, random:1:",
            r"Answers depend on the order of requests: \d of 9 pairs of orders differ "
            r"\(0\.\d+; max_variation=0\)\.",
            r"  request \d: \S+ and \S+ differ",
            r"    \S+: '.*'",
            r"    \S+: '.*'",
            r"    history: their KV differs first at layer \d, in '.+'; the answers part at "
            r"token \d \(.+ or .+\), margins .+ and .+ logits",
        ]
    )


def test_an_agent_that_opens_its_own_sessions_needs_the_marker_alone(run: pytest.Pytester) -> None:
    result = outcome(
        run,
        """
@pytest.fixture
def opened(engine):
    with RollingSession.open(model=engine, window=3, **HISTORICAL) as session:
        yield session

@pytest.mark.replay_determinism(protocol="plain")
class TestAgent:
    def test_in_the_test(self, engine):
        with RollingSession.open(model=engine, window=3, **HISTORICAL) as session:
            agent(session)

    def test_in_a_fixture(self, opened):
        agent(opened)

    @pytest.mark.replay_determinism(max_variation=1.0)
    def test_closest_marker_counts(self, opened):
        agent(opened)

def test_without_a_marker(opened):
    agent(opened)
""",
    )
    result.assert_outcomes(failed=2, passed=2)
    assert result.stdout.str().count("Answers depend on the order of requests") == 2


def test_conversations_are_replayed_each_by_itself(run: pytest.Pytester) -> None:
    """As chat models have them: sessions with messages in the window, which is moved from turn to turn."""
    result = outcome(
        run,
        """
from rolling_kv.config import session_config
from rolling_kv.store.memory import MemoryStore
from rolling_kv.window import ConversationLayout

def chat(engine, name, **settings):
    layout = ConversationLayout(engine.tokenizer, instruction=f"You help {name}.")
    config = session_config(ingest="lazy", **settings)
    with RollingSession(engine=engine, store=MemoryStore(), config=config, layout=layout) as session:
        turns = [{"role": "user", "content": f"I am {name}."}]
        for number in range(2):
            session.show(turns[:-1])
            answer = session.ask(turns[-1], max_new_tokens=4)
            turns += [{"role": "assistant", "content": answer.text or "Hm."},
                      {"role": "user", "content": f"And {number}?"}]

@pytest.mark.replay_determinism(orders=["reversed"])
def test_contract(engine):
    for name in ("Ann", "Bob"):
        chat(engine, name, conditioning="window:1")
""",
    )
    result.assert_outcomes(passed=1)


def test_fidelity_is_asked_for(run: pytest.Pytester) -> None:
    result = outcome(
        run,
        """
@pytest.mark.replay_determinism(orders=["reversed"], min_fidelity=1.0)
def test_reuse(rolling_replay, engine):
    with rolling_replay.session(model=engine, window=3, **REUSE) as session:
        agent(session)

@pytest.mark.replay_determinism(orders=["reversed"], min_fidelity=1.0)
def test_full_prefill(rolling_replay, engine):
    with rolling_replay.session(model=engine, window=3, policy="full-prefill") as session:
        agent(session)
""",
    )
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.re_match_lines([r"Answers are not full prefill's: \d of 6 are \(.*; min_fidelity=1\)\."])
    assert "Answers depend on the order" not in result.stdout.str()


def test_nothing_to_replay_is_no_success(run: pytest.Pytester) -> None:
    result = outcome(
        run,
        """
@pytest.mark.replay_determinism
def test_no_session():
    pass

@pytest.mark.replay_determinism
def test_one_request(engine):
    with RollingSession.open(model=engine) as session:
        agent(session, requests=1)
""",
    )
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*opened: 0; their answered requests: 0.*needs at least two requests*"])
    result.stdout.fnmatch_lines(["*opened: 1; their answered requests: 1.*"])


def test_a_test_that_fails_or_skips_is_not_replayed(run: pytest.Pytester) -> None:
    result = outcome(
        run,
        """
@pytest.mark.replay_determinism
def test_fails(engine):
    assert engine is None

@pytest.mark.replay_determinism
def test_skips():
    pytest.skip("not today")

@pytest.mark.replay_determinism
@pytest.mark.xfail(strict=True)
def test_may_be_expected_to_fail(engine):
    with RollingSession.open(model=engine, window=3, **HISTORICAL) as session:
        agent(session)
""",
    )
    result.assert_outcomes(failed=1, skipped=1, xfailed=1)
    assert "nothing to replay" not in result.stdout.str()


def test_an_answer_kept_to_a_form_is_replayed_with_a_warning(run: pytest.Pytester) -> None:
    result = outcome(
        run,
        """
@pytest.mark.replay_determinism(orders=["reversed"])
def test_guided(engine):
    with RollingSession.open(model=engine, window=3) as session:
        agent(session)
        session.ask("Well?", max_new_tokens=2, guide=lambda ids, logits: logits)
""",
    )
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*replay did not run as asked: Decoded without the guide*"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "order=('reversed',)",
            "*order = ('reversed',): Extra inputs are not permitted*It takes orders, max_*",
        ),
        ("orders='reversed'", "*orders = 'reversed': *expected a tuple of names of orders*"),
        (
            "orders=('sideways',)",
            "*Unknown order 'sideways'. Expected chronological, reversed, random:<seed>*",
        ),
        ("orders=('repeat',)", "*Unknown order 'repeat'*"),
        ("max_variation=2", "*max_variation = 2: *less than or equal to 1*"),
        ("min_fidelity='all'", "*min_fidelity = 'all': *valid number*"),
        ("protocol='paper'", "*protocol = 'paper': *'populate' or 'plain'*"),
        ("0.1", "*takes keyword arguments alone, and got (0.1,)*"),
    ],
)
def test_unknown_arguments_are_usage_errors(run: pytest.Pytester, arguments: str, message: str) -> None:
    result = outcome(run, f"\n@pytest.mark.replay_determinism({arguments})\ndef test_agent():\n    pass\n")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: *test_agent: {message}"])


def test_kinds_of_tests_that_cannot_be_replayed_are_refused(run: pytest.Pytester) -> None:
    result = outcome(
        run,
        """
import unittest

@pytest.mark.replay_determinism
class TestAgent(unittest.TestCase):
    def test_agent(self):
        pass
""",
    )
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*works on test functions, and not on this TestCaseFunction*"])


def test_the_plugin_costs_nothing_until_it_is_used() -> None:
    check = (
        "import sys, pytest_rolling_kv;"
        "print([name for name in ('rolling_kv', 'torch', 'numpy', 'pydantic') if name in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


def test_pytest_finds_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["entry-points"]["pytest11"] == {"rolling-kv": "pytest_rolling_kv"}
    assert "pytest_rolling_kv" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
