"""The replay cache: LangChain's suites, and an agent replayed without its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import BaseCache
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_rolling_kv import ChatRollingKV, ReplayCache, ReplayMissError
from langchain_tests.integration_tests import AsyncCacheTestSuite, SyncCacheTestSuite
from scripted import ScriptedEngine, by_the_prompt


class TestSync(SyncCacheTestSuite):
    @pytest.fixture
    def cache(self, tmp_path: Path) -> BaseCache:
        return ReplayCache(tmp_path / "answers")


class TestAsync(AsyncCacheTestSuite):
    @pytest.fixture
    async def cache(self, tmp_path: Path) -> BaseCache:
        return ReplayCache(tmp_path / "answers")


def get_weather(location: str) -> str:
    """The weather."""
    return f"It is sunny in {location}."


def run(model: Any) -> list[AIMessage]:
    """A loop by hand: a call, its result, and the answer."""
    model = model.bind_tools([get_weather])
    asked = HumanMessage("What is the weather in 'Arlen'?")
    call = model.invoke([asked])
    result = ToolMessage(get_weather(**call.tool_calls[0]["args"]), tool_call_id=call.tool_calls[0]["id"])
    return [call, model.invoke([asked, call, result])]


def test_a_recorded_run_is_replayed_without_calling_the_model(tmp_path: Path) -> None:
    engine = ScriptedEngine(by_the_prompt)
    recorded = run(ChatRollingKV(engine=engine, cache=ReplayCache(tmp_path)))
    assert len(engine.prompts) == 2
    replay = ReplayCache(tmp_path, mode="replay")
    again = run(ChatRollingKV(engine=engine, cache=replay))
    assert len(engine.prompts) == 2
    assert [(one.content, one.tool_calls) for one in again] == [
        (one.content, one.tool_calls) for one in recorded
    ]
    assert again[0].response_metadata["rolling_kv"] == recorded[0].response_metadata["rolling_kv"]
    with pytest.raises(ReplayMissError, match=r"No answer is recorded.*mode='record'"):
        run(ChatRollingKV(engine=engine, cache=replay, ratio=0.5))
    assert len(engine.prompts) == 2


def test_an_interrupted_recording_leaves_nothing_half_written(tmp_path: Path, monkeypatch: Any) -> None:
    cache = ReplayCache(tmp_path)

    def fail(self: Path, *args: Any, **kwargs: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with pytest.raises(OSError, match="No space"):
            cache.update("prompt", "llm", [])
    assert cache.lookup("prompt", "llm") is None
