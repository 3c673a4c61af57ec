"""The middleware in real agents: windows, threads, checkpoints, restarts."""

from __future__ import annotations

import gc
import sqlite3
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest
from langchain_core.documents import Document
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, RemoveMessage, ToolMessage
from langchain_core.tools import tool
from langchain_rolling_kv import ChatRollingKV, RollingKVMiddleware
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from scripted import ScriptedEngine

from rolling_kv.errors import ConfigError
from tests.tiny_models import CHATML, HERMES

INSTRUCTION = (
    "You are a careful market analyst. You look closing prices up before you speak of them, one day at a "
    "time, and answer with the price alone, in dollars, with two digits behind the point and nothing else."
)


@tool
def close_of(day: int) -> str:
    """The closing price of Ferrant Steel on a day of March 2024."""
    return f"On {day} March 2024 the rolled steel company Ferrant Steel closed at {500 + day}.55 dollars."


@tool(response_format="content_and_artifact")
def search(about: str) -> tuple[str, list[Document]]:
    """Notes about something."""
    notes = [
        Document(page_content=f"Note {n} about {about}: it is well, as it was before.") for n in range(2)
    ]
    return "\n".join(note.page_content for note in notes), notes


def calling(times: int) -> Callable[[str], str]:
    """A script that looks up one day after the other, and then speaks."""

    def script(prompt: str) -> str:
        asked = prompt.rpartition("user\nTell")[2]
        done = asked.count("<tool_response>")
        if done >= times:
            return f"It is done after {done} calls."
        first = 1 + prompt.count("<tool_response>")
        return f'<tool_call>\n{{"name": "close_of", "arguments": {{"day": {first}}}}}\n</tool_call>'

    return script


def answers(messages: list[BaseMessage]) -> list[AIMessage]:
    return [message for message in messages if isinstance(message, AIMessage)]


def at_hand(message: AIMessage) -> float:
    """The share of the prompt whose KV was there before the call, and was kept."""
    usage = message.usage_metadata
    assert usage is not None
    return usage["input_token_details"]["cache_read"] / usage["input_tokens"]


def reused(message: AIMessage) -> float:
    """The share of the prompt that was exact prefix or reused, what this call had to store included."""
    usage = message.response_metadata["rolling_kv"]
    return (usage["prefix"] + usage["reused"]) / usage["prompt_tokens"]


@contextmanager
def sqlite_saver(path: Path) -> Iterator[SqliteSaver]:
    connection = sqlite3.connect(path, check_same_thread=False)
    try:
        yield SqliteSaver(connection)
    finally:
        connection.close()
        gc.collect()


def thread(name: str) -> dict[str, Any]:
    return {"configurable": {"thread_id": name}, "recursion_limit": 60}


def ask(text: str = "Tell me the closes.") -> dict[str, Any]:
    return {"messages": [HumanMessage(text)]}


@pytest.mark.parametrize(
    ("template", "newest", "least"),
    [(CHATML, "document", 0.8), (HERMES, "in-place", 0.6)],
    ids=["by-prompt", "by-template"],
)
def test_an_agent_of_twelve_calls_reuses_its_prompt_and_survives_a_restart(
    tmp_path: Path, template: str, newest: Any, least: float
) -> None:
    """`least` is the share of the prompt that the first call after the restart finds on disk."""

    def agent(saver: SqliteSaver, engine: ScriptedEngine) -> Any:
        model = ChatRollingKV(
            engine=engine,
            store_path=str(tmp_path / "kv"),
            policy="document-aligned",
            conditioning="window:3",
            fresh_tail=0,
        )
        middleware = [RollingKVMiddleware(window=8, newest=newest)]
        return create_agent(
            model, [close_of], system_prompt=INSTRUCTION, middleware=middleware, checkpointer=saver
        )

    with sqlite_saver(tmp_path / "state.db") as saver:
        messages = agent(saver, ScriptedEngine(calling(12), template=template)).invoke(ask(), thread("a"))[
            "messages"
        ]
    assert [one.tool_calls[0]["args"]["day"] for one in answers(messages)[:-1]] == list(range(1, 13))
    assert answers(messages)[-1].content == "It is done after 12 calls."
    assert min(reused(one) for one in answers(messages)[1:]) > 0.8
    assert min(at_hand(one) for one in answers(messages)[2:]) > least - 0.3
    assert all(not one.response_metadata["rolling_kv"]["degraded"] for one in answers(messages))

    engine = ScriptedEngine(calling(0), template=template)
    with sqlite_saver(tmp_path / "state.db") as saver:
        again = agent(saver, engine).invoke(ask("Tell me the last one."), thread("a"))["messages"]
    assert len(again) == len(messages) + 2
    assert at_hand(again[-1]) > least, "the engine, the model and the agent are new"
    prompt = engine.prompts[-1]
    shown = [day for day in range(1, 13) if f"closed at {500 + day}.55" in prompt]
    assert shown == list(range(5, 13)), "the newest eight, each once, before the conversation"
    assert prompt.index("closed at 512.55") < prompt.index("Tell me the closes.")
    assert prompt.count("has left the window.") == 4
    assert prompt.count("See [") == 8


async def test_an_agent_runs_with_await(tmp_path: Path) -> None:
    model = ChatRollingKV(engine=ScriptedEngine(calling(2)))
    async with AsyncSqliteSaver.from_conn_string(str(tmp_path / "state.db")) as saver:
        agent = create_agent(model, [close_of], middleware=[RollingKVMiddleware()], checkpointer=saver)
        messages = (await agent.ainvoke(ask(), thread("a")))["messages"]
        state = await agent.aget_state(thread("a"))
    assert answers(messages)[-1].content == "It is done after 2 calls."
    assert len(state.values["rolling_kv_window"]) == 1, "the second result was shown in its place"
    gc.collect()


def test_threads_share_neither_documents_nor_kv() -> None:
    engine = ScriptedEngine(calling(2))
    model = ChatRollingKV(engine=engine)
    agent = create_agent(
        model,
        [close_of],
        system_prompt=INSTRUCTION,
        middleware=[RollingKVMiddleware()],
        checkpointer=InMemorySaver(),
    )
    agent.invoke(ask("Tell A."), thread("a"))
    seen = len(engine.prompts)
    first = answers(agent.invoke(ask("Tell B."), thread("b"))["messages"])
    assert at_hand(first[0]) == 0, "not even the instruction's KV, which is the same text"
    assert not any("Tell A." in prompt for prompt in engine.prompts[seen:])
    for _ in range(2):
        for name in ("a", "b"):
            seen = len(engine.prompts)
            agent.invoke(ask(f"Tell {name.upper()} again."), thread(name))
            other = "B" if name == "a" else "A"
            assert not any(f"Tell {other}" in prompt for prompt in engine.prompts[seen:])
    days = {name: agent.get_state(thread(name)).values["rolling_kv_window"] for name in ("a", "b")}
    assert days["a"] == days["b"], "both looked up the same days"
    assert len(days["a"]) == 5


def test_retrieved_documents_and_plain_results_make_the_window() -> None:
    found, notes = search.func("steel")
    messages: list[BaseMessage] = [
        HumanMessage("Tell me."),
        AIMessage("", tool_calls=[{"name": "search", "args": {"about": "steel"}, "id": "1"}]),
        ToolMessage(found, tool_call_id="1", artifact=notes),
        AIMessage("", tool_calls=[{"name": "close_of", "args": {"day": 1}, "id": "2"}]),
        ToolMessage(
            "Error: the exchange was closed on that day, as it was before.", tool_call_id="2", status="error"
        ),
        ToolMessage("too short", tool_call_id="3"),
        ToolMessage(notes[0].page_content, tool_call_id="4"),
    ]
    middleware = RollingKVMiddleware(newest="document")
    state: Any = {"messages": messages}
    state |= middleware.before_model(state, None)  # type: ignore[arg-type]  # no runtime is read
    model = ChatRollingKV(engine=ScriptedEngine(calling(0)))
    shown: list[ModelRequest[Any]] = []
    middleware.wrap_model_call(ModelRequest(model=model, messages=messages, state=state), shown.append)  # type: ignore[arg-type]
    documents = shown[0].model_settings["documents"]
    assert [one["text"] for one in documents] == [notes[1].page_content, notes[0].page_content], "newest last"
    first, second = documents[1]["id"], documents[0]["id"]
    contents = [one.content for one in shown[0].messages if isinstance(one, ToolMessage)]
    assert contents == [
        f"See [{first}].\nSee [{second}].",
        messages[4].content,
        "too short",
        f"See [{first}].",
    ]
    assert messages[2].content == found, "the state's messages stay whole"


def test_a_new_result_is_shown_in_its_place_until_it_is_answered() -> None:
    engine = ScriptedEngine(calling(2))
    agent = create_agent(ChatRollingKV(engine=engine), [close_of], middleware=[RollingKVMiddleware()])
    agent.invoke(ask())
    first, second, third = engine.prompts
    assert "501.55" not in first
    assert second.index("Tell me") < second.index("501.55")
    assert third.index("501.55") < third.index("Tell me") < third.index("502.55")
    assert third.count("501.55") == third.count("See [") == 1


def test_a_document_leaves_with_its_message(tmp_path: Path) -> None:
    engine = ScriptedEngine(calling(2))
    agent = create_agent(
        ChatRollingKV(engine=engine),
        [close_of],
        middleware=[RollingKVMiddleware()],
        checkpointer=InMemorySaver(),
    )
    messages = agent.invoke(ask(), thread("a"))["messages"]
    gone = [RemoveMessage(id=message.id) for message in messages[:3]]
    agent.invoke({"messages": [*gone, HumanMessage("Tell me more.")]}, thread("a"))
    assert not any("501.55" in prompt for prompt in engine.prompts[3:4])
    assert "502.55" in engine.prompts[3]


def test_the_state_holds_nothing_but_text(tmp_path: Path) -> None:
    """Hashes and messages: the checkpoint is a few kilobytes, and no tensor is in it."""
    agent = create_agent(
        ChatRollingKV(engine=ScriptedEngine(calling(3))),
        [close_of],
        middleware=[RollingKVMiddleware()],
        checkpointer=InMemorySaver(),
    )
    agent.invoke(ask(), thread("a"))
    values = agent.get_state(thread("a")).values
    assert all(isinstance(key, str) and len(key) == 32 for key in values["rolling_kv_window"])
    assert set(values) == {"messages", "rolling_kv_window"}


@pytest.mark.parametrize("choice", ["warn", "ignore", "raise"])
def test_another_model_is_warned_of_ignored_or_refused(choice: Any) -> None:
    agent = create_agent(
        FakeListChatModel(responses=["hello"]), middleware=[RollingKVMiddleware(unsupported_model=choice)]
    )
    if choice == "raise":
        with pytest.raises(ConfigError, match="FakeListChatModel"):
            agent.invoke(ask())
    elif choice == "warn":
        with pytest.warns(UserWarning, match="passed on unchanged"):
            assert agent.invoke(ask())["messages"][-1].content == "hello"
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert agent.invoke(ask())["messages"][-1].content == "hello"


def test_settings_that_are_not_as_expected() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        RollingKVMiddleware(window=0)
    with pytest.raises(ConfigError, match="warn, ignore or raise"):
        RollingKVMiddleware(unsupported_model="shout")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ConfigError, match="in-place or document"):
        RollingKVMiddleware(newest="last")  # type: ignore[arg-type]  # wrong on purpose
