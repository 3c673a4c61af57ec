"""Agents under the replay plugin, in runs of pytest of its own: a real tiny model, a scripted tool loop."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[3]
AGENT = """
import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.messages import HumanMessage
from langchain_rolling_kv import ChatRollingKV, RollingKVMiddleware
from langgraph.checkpoint.memory import InMemorySaver
from scripted import tiny_engine

HISTORICAL = {
    "policy": "token-topk", "ratio": 0.05, "conditioning": "first-seen", "deterministic": False
}

def close_of(day: int) -> str:
    "The closing price of Ferrant Steel on a day of March 2024."
    return f"On {day} March 2024 the rolled steel company Ferrant Steel closed at {500 + day}.55."

@wrap_model_call
def look_up_first(request, handler):
    "The model speaks for itself; what it calls, which random weights cannot write, is scripted."
    response = handler(request)
    if isinstance(request.messages[-1], HumanMessage):
        day = sum(isinstance(message, HumanMessage) for message in request.messages)
        called = {"type": "tool_call", "name": "close_of", "args": {"day": day}, "id": f"call_{day}"}
        response.result[0] = response.result[0].model_copy(update={"tool_calls": [called]})
    return response

def agent_of(max_tokens=6, **settings):
    return create_agent(
        ChatRollingKV(engine=tiny_engine(), max_tokens=max_tokens, **settings),
        [close_of],
        system_prompt="Speak of prices.",
        middleware=[look_up_first, RollingKVMiddleware(window=2)],
        checkpointer=InMemorySaver(),
    )

def question(number):
    return {"messages": [HumanMessage(f"And what of day {number}?")]}

def today() -> str:
    "Which day it is."
    return "It is 4 March 2024."

def thread(name):
    return {"configurable": {"thread_id": name}}

def talk(agent, threads=("a", "b"), questions=2):
    for number in range(questions):
        for name in threads:
            agent.invoke(question(number), thread(name))
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.syspathinsert(ROOT)
    pytester.syspathinsert(Path(__file__).parent)
    return pytester


def outcome(run: pytest.Pytester, source: str) -> pytest.RunResult:
    run.makepyfile(AGENT + source)
    return run.runpytest_inprocess(
        *("-p", "pytest_rolling_kv", "-p", "pytest_asyncio.plugin", "-p", "no:cacheprovider"),
        *("-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function"),
        *("-W", "default", "--strict-markers"),
    )


def test_an_agent_with_tools_is_replayed_thread_by_thread(run: pytest.Pytester) -> None:
    """Requests of one thread are its calls: two a question, over a window that the middleware rolls."""
    result = outcome(
        run,
        """
from rolling_kv.replay.pytest_plugin import RollingReplay

@pytest.mark.replay_determinism(orders=["reversed"])
def test_agent(rolling_replay):
    talk(agent_of(conditioning="window:1"))
    told = [(one.about.split(", ")[-1], len(one.history())) for one in rolling_replay._recorded]
    assert told == [("default/a", 4), ("default/b", 4)]
""",
    )
    result.assert_outcomes(passed=1)


def test_an_agent_whose_answers_depend_on_history_fails(run: pytest.Pytester) -> None:
    result = outcome(
        run,
        """
@pytest.mark.replay_determinism(orders=["reversed"])
def test_agent():
    talk(agent_of(max_tokens=24, **HISTORICAL), threads=("a",), questions=3)
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.re_match_lines(
        [
            r"A session \(tiny-0, token-topk, first-seen, default/a\), 6 requests in the orders "
            "chronological, reversed:",
            r"Answers depend on the order of requests: \d of 6 pairs of orders differ .*",
            r"  request \d: (chronological and reversed|reversed and chronological) differ",
            r"    history: their KV differs first at layer \d, in '.+'; the answers part at .+",
        ]
    )


def test_other_ways_to_run_an_agent_are_recorded_as_well(run: pytest.Pytester) -> None:
    """Awaited, streamed, and several threads at once."""
    result = outcome(
        run,
        """
@pytest.mark.replay_determinism(orders=["reversed"])
async def test_awaited(rolling_replay):
    # a saver in memory awaits well; the middlewares of an awaited agent must be async
    agent = create_agent(
        ChatRollingKV(engine=tiny_engine(), max_tokens=4, conditioning="window:1"),
        middleware=[RollingKVMiddleware(window=2)],
        checkpointer=InMemorySaver(),
    )
    for number in range(2):
        await agent.ainvoke(question(number), thread("a"))
    assert [len(one.history()) for one in rolling_replay._recorded] == [2]

@pytest.mark.replay_determinism(orders=["reversed"])
def test_streamed_and_at_once(rolling_replay):
    agent = agent_of(conditioning="window:1")
    for _ in agent.stream(question(0), thread("a"), stream_mode="messages"):
        pass
    agent.batch([question(1), question(1)], [thread("a"), thread("b")])
    assert sorted(len(one.history()) for one in rolling_replay._recorded) == [2, 4]
""",
    )
    result.assert_outcomes(passed=2)


def test_answers_kept_to_a_form_are_said_to_be_replayed_without_it(run: pytest.Pytester) -> None:
    """A call that `tool_choice` forces is decoded under a grammar."""
    result = outcome(
        run,
        """
@pytest.mark.replay_determinism(orders=["reversed"], min_fidelity=1.0)
def test_forced():
    model = ChatRollingKV(engine=tiny_engine(), max_tokens=128, **HISTORICAL)
    forced = model.bind_tools([today], tool_choice="any")
    for number in range(2):
        asked = [HumanMessage(f"Word {number + word}.") for word in range(3)]
        assert forced.invoke([*asked, HumanMessage(f"And day {number}?")]).tool_calls

@pytest.mark.replay_determinism(orders=["reversed"])
def test_sampled():
    talk(agent_of(temperature=2.0, **HISTORICAL))
""",
    )
    result.assert_outcomes(failed=2, warnings=1)
    result.stdout.fnmatch_lines(
        [
            "The replay did not run as asked: Decoded without the guide (a grammar, for example) that it was "
            "recorded with: *",
            "4 of 4 requests were sampled, and are again, each with its recorded seed: *",
        ]
    )
