"""From LangChain's messages and documents to the turns that a chat template takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from langchain_rolling_kv.errors import UnsupportedContentError
from langchain_rolling_kv.tool_calls import calls_as_text, result_as_text

Turn = dict[str, Any]

# Blocks that no prompt shows: calls are in `tool_calls`, and a model's reasoning is its own.
_SILENT = {
    "input_json_delta",
    "invalid_tool_call",
    "reasoning",
    "thinking",
    "tool_call",
    "tool_call_chunk",
    "tool_use",
}
_ROLES = {"system": "system", "assistant": "assistant", "ai": "assistant"}


def instruction_of(messages: Sequence[BaseMessage]) -> tuple[str, list[BaseMessage]]:
    """The text of the leading system messages, and the messages after them."""
    first = next((n for n, one in enumerate(messages) if not isinstance(one, SystemMessage)), len(messages))
    return "\n\n".join(text_of(message) for message in messages[:first]), list(messages[first:])


def turns_of(messages: Iterable[BaseMessage], *, native_tools: bool) -> list[Turn]:
    """A turn for each message; an answer that says nothing has none.

    Args:
        native_tools: whether the chat template knows calls and results; otherwise they are spelled out in the
            turns of assistant and user. Ids never reach a prompt, which would be another one in every run.

    Raises:
        UnsupportedContentError
    """
    turns = []
    for message in messages:
        text = text_of(message)
        if isinstance(message, AIMessage):
            calls = message.tool_calls
            if calls and native_tools:
                turns.append({"role": "assistant", "content": text, "tool_calls": _as_functions(calls)})
            elif text.strip() or calls:
                turns.append({"role": "assistant", "content": calls_as_text(text, calls)})
        elif isinstance(message, ToolMessage | FunctionMessage):
            result = text if text.strip() else "(no output)"
            if native_tools:
                turns.append({"role": "tool", "name": message.name or "", "content": result})
            else:
                turns.append({"role": "user", "content": result_as_text(result)})
        else:
            turns.append({"role": _role(message), "content": text})
    return turns


def document_turns(documents: Iterable[str | Mapping[str, Any] | Document]) -> list[Turn]:
    """A user's turn for each document: its text, behind the id by which messages refer to it, if any."""
    turns: list[Turn] = []
    for document in documents:
        if isinstance(document, Document):
            name, text = document.id, document.page_content
        elif isinstance(document, str):
            name, text = None, document
        else:
            name, text = document.get("id"), document["text"]
        turns.append({"role": "user", "content": f"[{name}] {text}" if name else text})
    return turns


def text_of(message: BaseMessage) -> str:
    """The text of a message.

    Raises:
        UnsupportedContentError: it also holds something that is not text.
    """
    if isinstance(message.content, str):
        return message.content
    pieces = []
    for block in message.content:
        kind = "text" if isinstance(block, str) else block.get("type", "")
        if kind == "text":
            pieces.append(block if isinstance(block, str) else block["text"])
        elif kind not in _SILENT:
            raise UnsupportedContentError(
                f"A message of type {message.type!r} holds a block of type {kind!r}; this model reads text "
                "only. Describe it in words, or leave it out."
            )
    return "".join(pieces)


def _role(message: BaseMessage) -> str:
    if isinstance(message, HumanMessage):
        return "user"
    if isinstance(message, ChatMessage) and message.role in _ROLES:
        return "user" if _ROLES[message.role] == "system" else _ROLES[message.role]
    return "user"  # a system message amid the conversation too: few templates take one there


def _as_functions(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": call["name"], "arguments": call["args"]}} for call in calls
    ]
