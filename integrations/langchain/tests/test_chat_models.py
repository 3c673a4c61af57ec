"""The chat model beyond the standard suites: the account, what decides an answer, forms, errors, tracing."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.exceptions import ContextOverflowError
from langchain_core.load import dumpd, load
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_rolling_kv import (
    ChatRollingKV,
    IncompleteAnswerError,
    PromptOverflowError,
    SchemaError,
    UnsupportedContentError,
)
from pydantic import BaseModel
from scripted import ScriptedEngine, tiny_engine

from rolling_kv.engine.host import TransformersHost
from rolling_kv.errors import ConfigError
from tests.engine.stock import stock_logits
from tests.tiny_models import CHATML, HERMES

CONVERSATION: list[BaseMessage] = [
    SystemMessage("You are a market analyst."),
    HumanMessage("On 4 March Ferrant Steel closed at 518.55 dollars."),
    AIMessage("Noted."),
    HumanMessage("On 5 March it closed at 520.10 dollars."),
    AIMessage("Noted, too."),
    HumanMessage("When was it more?"),
]
RECORDS = [{"id": f"rec{n}", "text": f"Record {n} says {n * 7919 % 1000} dollars."} for n in range(4)]


class Close(BaseModel):
    """The closing price of a company."""

    company: str
    dollars: float


def usage(message: AIMessage) -> dict[str, Any]:
    return message.response_metadata["rolling_kv"]


def test_the_account_adds_up_and_rolls_when_the_head_is_trimmed(engine: TransformersHost) -> None:
    model = ChatRollingKV(engine=engine, max_tokens=3, conditioning="isolated")
    first = model.invoke(CONVERSATION, documents=RECORDS)
    again = model.invoke(CONVERSATION, documents=RECORDS)
    trimmed = model.invoke([CONVERSATION[0], *CONVERSATION[3:]], documents=RECORDS[1:])
    for message in (first, again, trimmed):
        parts = usage(message)
        total = parts["prefix"] + parts["reused"] + parts["recomputed"] + parts["computed"]
        details = message.usage_metadata["input_token_details"]
        assert total == message.usage_metadata["input_tokens"] == parts["prompt_tokens"]
        assert details["cache_read"] + details["cache_creation"] <= parts["prefix"] + parts["reused"]
    assert first.usage_metadata["input_token_details"]["cache_read"] == 0
    for message in (again, trimmed):
        details = message.usage_metadata["input_token_details"]
        assert details["cache_creation"] == usage(message)["ingested"] == 0
        assert details["cache_read"] == usage(message)["prefix"] + usage(message)["reused"] > 0
    assert usage(first)["logits_fingerprint"] == usage(again)["logits_fingerprint"]


@pytest.mark.parametrize(("conditioning", "fresh_tail"), [("isolated", 0), ("window:3", 0), ("window:1", 1)])
def test_the_answer_is_a_function_of_the_prompt(
    engine: TransformersHost, conditioning: str, fresh_tail: int
) -> None:
    settings: dict[str, Any] = {"conditioning": conditioning, "fresh_tail": fresh_tail}
    fresh = ChatRollingKV(engine=engine, max_tokens=8, **settings)
    aged = ChatRollingKV(engine=engine, max_tokens=8, **settings)
    aged.invoke(CONVERSATION[:2], documents=RECORDS[:1])
    aged.invoke(CONVERSATION[:4], documents=RECORDS)
    aged.invoke("Something else.")
    expected = fresh.invoke(CONVERSATION, documents=RECORDS[1:])
    answer = aged.invoke(CONVERSATION, documents=RECORDS[1:])
    assert answer.content == expected.content
    assert usage(answer)["logits_fingerprint"] == usage(expected)["logits_fingerprint"]


def test_the_prompt_is_what_the_template_renders(engine: TransformersHost) -> None:
    """At full prefill the first token is the stock forward's over transformers' own rendering."""
    model = ChatRollingKV(engine=engine, max_tokens=1)
    answer = model.invoke(CONVERSATION, policy="full-prefill")
    roles = {"system": "system", "human": "user", "ai": "assistant"}
    rendered = engine.tokenizer.render([{"role": roles[m.type], "content": m.text} for m in CONVERSATION])
    assert rendered is not None
    ids = engine.tokenizer.encode(rendered, special=True)
    token = int(stock_logits(engine, ids)[-1].argmax())
    assert answer.content == engine.tokenizer.decode([token])
    assert usage(answer)["computed"] == len(ids)


def test_documents_stand_between_instruction_and_messages() -> None:
    scripted = ScriptedEngine(lambda _: "Yes.")
    ChatRollingKV(engine=scripted).invoke(CONVERSATION[:2], documents=[*RECORDS[:1], "plain text"])
    assert scripted.prompts[0] == (
        "system\nYou are a market analyst.\nuser\n[rec0] Record 0 says 0 dollars.\nuser\nplain text\n"
        "user\nOn 4 March Ferrant Steel closed at 518.55 dollars.\nassistant\n"
    )


def test_streamed_pieces_are_the_answer_and_callbacks_see_each_once(engine: TransformersHost) -> None:
    class Listener(BaseCallbackHandler):
        def __init__(self) -> None:
            self.tokens: list[str] = []

        def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
            self.tokens.append(token)

    listener = Listener()
    model = ChatRollingKV(engine=engine, max_tokens=12)
    pieces = [chunk.text for chunk in model.stream(CONVERSATION, config={"callbacks": [listener]})]
    assert "".join(pieces) == "".join(listener.tokens) == model.invoke(CONVERSATION).content
    assert len(pieces) > 3


# --- forms
# -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHATML, HERMES], ids=["by-prompt", "by-template"])
def test_any_model_makes_a_well_formed_call(template: str) -> None:
    """Random weights, sampled: what they call is arbitrary, and always of the schema."""
    model = ChatRollingKV(engine=tiny_engine(template=template), temperature=1.0, max_tokens=400)
    schema = {
        "title": "buy",
        "description": "Buys shares.",
        "type": "object",
        "properties": {"ticker": {"enum": ["FERR", "MOND"]}, "limit": {"type": "boolean"}},
        "required": ["ticker", "limit"],
    }
    forced = model.bind_tools([schema], tool_choice="any")
    for seed in range(2):
        (call,) = forced.invoke(CONVERSATION, seed=seed).tool_calls
        assert call["name"] == "buy"
        assert call["args"]["ticker"] in ("FERR", "MOND")
        assert isinstance(call["args"]["limit"], bool)
        parsed = model.with_structured_output(schema, method="json_schema").invoke(CONVERSATION)
        assert set(parsed) == {"ticker", "limit"}


def test_text_and_calls_are_parted_as_they_stream() -> None:
    said = (
        "I will look <it> up.\n\n"
        '<tool_call>\n{"name": "Close", "arguments": {"company": "Füü", "dollars": 1.5}}\n</tool_call>\n'
        '<tool_call>\n{"name": "Close", "arguments": {"company": "B", "dollars": 2}}\n</tool_call>'
    )
    model = ChatRollingKV(engine=ScriptedEngine(lambda _: said)).bind_tools([Close])
    chunks = list(model.stream("Which?"))
    assert "".join(chunk.text for chunk in chunks[:-1]) == "I will look <it> up."
    message = sum(chunks[1:], chunks[0])
    assert [call["args"] for call in message.tool_calls] == [
        {"company": "Füü", "dollars": 1.5},
        {"company": "B", "dollars": 2},
    ]
    assert message.response_metadata["finish_reason"] == "tool_calls"
    ids = [call["id"] for call in message.tool_calls]
    assert len(set(ids)) == 2
    assert ids == [call["id"] for call in model.invoke("Which?").tool_calls], "the same in every run"
    later = model.invoke([HumanMessage("Which?"), message, ToolMessage("ok", tool_call_id=ids[0])])
    assert set(ids).isdisjoint(call["id"] for call in later.tool_calls), "and others later on"


def test_ids_do_not_reach_the_prompt() -> None:
    scripted = ScriptedEngine(lambda _: "Yes.", template=HERMES)
    model = ChatRollingKV(engine=scripted).bind_tools([Close])
    for name in ("a1b2", "c3d4"):
        call = {"name": "Close", "args": {"company": "F", "dollars": 1.0}, "id": name}
        model.invoke(
            [
                HumanMessage("Q", id=name),
                AIMessage("", tool_calls=[call]),
                ToolMessage("1", tool_call_id=name),
            ]
        )
    assert scripted.prompts[0] == scripted.prompts[1]


@pytest.mark.parametrize(
    "said",
    [
        "<tool_call>\nnot JSON\n</tool_call>",
        '<tool_call>\n{"arguments": {}}',
        '<tool_call>\n{"name": "Close", "arguments": {"company": "unfin',
        "<tool_call>[1]</tool_call>",
    ],
)
def test_a_call_that_cannot_be_read_is_reported_as_such(said: str) -> None:
    message = ChatRollingKV(engine=ScriptedEngine(lambda _: said)).bind_tools([Close]).invoke("Which?")
    assert message.tool_calls == []
    assert len(message.invalid_tool_calls) == 1
    assert json.loads(str(message.invalid_tool_calls[0]["args"])) in said


def test_what_only_looks_like_a_call_is_text() -> None:
    model = ChatRollingKV(engine=ScriptedEngine(lambda _: "a <tool_ b <tool"))
    assert model.bind_tools([Close]).invoke("Which?").content == "a <tool_ b <tool"


def test_a_model_can_be_kept_from_calling() -> None:
    said = 'No: <tool_call>\n{"name": "Close", "arguments": {}}\n</tool_call>'
    model = ChatRollingKV(engine=ScriptedEngine(lambda _: said))
    assert model.bind_tools([Close]).invoke("Which?").tool_calls
    message = model.bind_tools([Close], tool_choice="none").invoke("Which?")
    assert message.tool_calls == []
    assert str(message.content).startswith("No: <tool")
    assert "<tool_" not in message.content


def test_an_unfinished_form_is_an_error(engine: TransformersHost) -> None:
    model = ChatRollingKV(engine=engine, max_tokens=9)
    with pytest.raises(IncompleteAnswerError, match=r"length.*9 tokens.*tool call.*max_tokens"):
        model.bind_tools([Close], tool_choice="any").invoke("Which?")
    with pytest.raises(IncompleteAnswerError, match="JSON"):
        model.with_structured_output(Close, method="json_schema").invoke("Which?")


def test_a_schema_that_no_grammar_can_hold_is_an_error(engine: TransformersHost) -> None:
    schema = {"title": "odd", "type": "object", "properties": {"a": {"$ref": "#/nowhere"}}, "required": ["a"]}
    with pytest.raises(SchemaError, match="simpler schema"):
        ChatRollingKV(engine=engine).invoke("Which?", response_schema=schema)


# --- identity, caches, tracing
# -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The function `load` is in beta")
def test_it_loads_again_from_what_it_was_dumped_as() -> None:
    model = ChatRollingKV(model="smollm2", ratio=0.2, stop=["\n"], store_path="~/kv")
    dumped = json.loads(json.dumps(dumpd(model)))
    loaded = load(dumped, allowed_objects=[ChatRollingKV], valid_namespaces=["langchain_rolling_kv"])
    assert isinstance(loaded, ChatRollingKV)
    assert loaded.asdict() == model.asdict()


def test_engines_are_told_apart_by_more_than_a_name(engine: TransformersHost) -> None:
    one, other = ChatRollingKV(engine=engine), ChatRollingKV(engine=tiny_engine(seed=1))
    renamed = copy.copy(tiny_engine(seed=1))
    renamed.name = engine.name
    third = ChatRollingKV(engine=renamed)
    assert third.model_name == one.model_name
    assert len({model._get_llm_string() for model in (one, other, third)}) == 3
    changes = [{}, {"ratio": 0.3}, {"policy": "epic"}, {"conditioning": "isolated"}, {"seed": 1}]
    changes += [{"fresh_tail": 1}]
    assert len({ChatRollingKV(engine=engine, **one)._get_llm_string() for one in changes}) == len(changes)
    elsewhere = ChatRollingKV(engine=engine, store_path="~/kv", namespace="other")
    assert elsewhere._get_llm_string(namespace="third") == one._get_llm_string(), "KV decides no answer"
    assert "engine" not in json.dumps(dumpd(one)["kwargs"]).replace("engine_fingerprint", "")


def test_callbacks_never_carry_tensors(engine: TransformersHost) -> None:
    class Collector(BaseCallbackHandler):
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
            self.seen.append((args, kwargs))

        def on_llm_new_token(self, *args: Any, **kwargs: Any) -> None:
            self.seen.append((args, kwargs))

        def on_llm_end(self, *args: Any, **kwargs: Any) -> None:
            self.seen.append((args, kwargs))

    def walk(value: Any) -> None:
        assert not isinstance(value, torch.Tensor | TransformersHost)
        if isinstance(value, dict):
            for one in value.values():
                walk(one)
        elif isinstance(value, list | tuple | set):
            for one in value:
                walk(one)
        elif isinstance(value, BaseModel):
            walk(value.model_dump())

    collector = Collector()
    model = ChatRollingKV(engine=engine, max_tokens=4).bind_tools([Close])
    model.invoke(CONVERSATION, documents=RECORDS, config={"callbacks": [collector]})
    list(model.stream(CONVERSATION, config={"callbacks": [collector]}))
    assert len(collector.seen) >= 6
    walk(collector.seen)
    params = collector.seen[0][1]["invocation_params"]
    assert params["engine_fingerprint"] == ChatRollingKV(engine=engine).engine_fingerprint
    assert params["documents"] == RECORDS


# --- bad input
# ---------------------------------------------------------------------------------------------------


def test_what_is_not_as_expected(engine: TransformersHost) -> None:
    model = ChatRollingKV(engine=engine, max_tokens=2)
    image = {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}
    with pytest.raises(UnsupportedContentError, match=r"'human'.*'image_url'.*text only"):
        model.invoke([HumanMessage([{"type": "text", "text": "What is this?"}, image])])
    with pytest.raises(PromptOverflowError, match="16384 positions") as caught:
        model.invoke("word " * 4000)
    assert isinstance(caught.value, ContextOverflowError)
    with pytest.raises(ConfigError, match="nothing to answer"):
        model.invoke([SystemMessage("Only this.")])
    with pytest.raises(ConfigError, match=r"cannot set magic; it may set temperature"):
        model.invoke("Hello", magic=1)
    with pytest.raises(ConfigError, match="one of the tools: Close"):
        model.bind_tools([Close], tool_choice="Open")
    assert model.invoke("Hello").content, "it still works"


def test_tokens_are_counted_by_the_model(engine: TransformersHost) -> None:
    assert ChatRollingKV(engine=engine).get_num_tokens("ünï") == 5, "bytes"


def test_kv_outlives_the_model_in_a_folder(engine: TransformersHost, tmp_path: Path) -> None:
    settings = {"engine": engine, "max_tokens": 2, "store_path": str(tmp_path)}
    ChatRollingKV(**settings).invoke(CONVERSATION, documents=RECORDS)
    details = (
        ChatRollingKV(**settings)
        .invoke(CONVERSATION, documents=RECORDS)
        .usage_metadata["input_token_details"]
    )
    assert details["cache_creation"] == 0
    assert details["cache_read"] > 0
    other = ChatRollingKV(**settings).invoke(CONVERSATION, documents=RECORDS, namespace="other")
    assert other.usage_metadata["input_token_details"]["cache_read"] == 0
