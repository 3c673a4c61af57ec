"""Tool calls as text: how they are asked for, written into past turns, and read out of an answer.

The spelling is that of Hermes, which Qwen and others learned:
<tool_call>{"name": ..., "arguments": ...}</tool_call>.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash
from langchain_core.messages import ToolCallChunk
from langchain_core.messages.tool import tool_call_chunk

OPENING, CLOSING = "<tool_call>", "</tool_call>"

_INSTRUCTION = f"""\
You may call these functions:
{{functions}}
To call one, answer with nothing but
{OPENING}
{{{{"name": "the function", "arguments": {{{{"an argument": "its value"}}}}}}}}
{CLOSING}"""


def tools_instruction(tools: Sequence[Mapping[str, Any]]) -> str:
    """What tells a model of its tools when its chat template does not."""
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return _INSTRUCTION.format(functions=functions)


def calls_as_text(text: str, calls: Sequence[Mapping[str, Any]]) -> str:
    """An assistant's turn with its calls spelled out."""
    written = [
        json.dumps({"name": call["name"], "arguments": call["args"]}, ensure_ascii=False) for call in calls
    ]
    return "\n".join(
        [*([text] if text.strip() else []), *(f"{OPENING}\n{one}\n{CLOSING}" for one in written)]
    )


def result_as_text(text: str) -> str:
    """A user's turn with what a function returned."""
    return f"<tool_response>\n{text}\n</tool_response>"


class ToolCallReader:
    """Parts an answer, piece by piece, into what is said and what is called."""

    def __init__(self) -> None:
        self._text = ""
        self._shown = 0

    def feed(self, piece: str) -> str:
        """The text that can be shown now: nothing from what may be a call's beginning on."""
        self._text += piece
        return self._show(_spoken(self._text))

    def rest(self) -> str:
        """The text that was held back and turned out to be no call."""
        return "" if OPENING in self._text else self._show(self._text)

    def calls(self, *, before: int) -> list[ToolCallChunk]:
        """The calls of the whole answer; one that is not as expected keeps its raw text as arguments.

        Args:
            before: calls made earlier in the conversation; ids are made from this and the content, so that
                the same conversation has the same ids in every run.
        """
        bodies = re.findall(f"{OPENING}(.*?)(?:{CLOSING}|$)", self._text, flags=re.DOTALL)
        chunks = []
        for index, body in enumerate(bodies):
            name, arguments = _parsed(body.strip())
            digest = xxhash.xxh3_64_hexdigest(f"{before + index}\0{name}\0{arguments}".encode())
            chunks.append(tool_call_chunk(name=name, args=arguments, id=f"call_{digest}", index=index))
        return chunks

    def _show(self, text: str) -> str:
        piece, self._shown = text[self._shown :], max(self._shown, len(text))
        return piece


def _spoken(text: str) -> str:
    """`text` up to where a call begins or may be about to, and without white space before that."""
    said, begun, _ = text.partition(OPENING)
    if not begun:
        for length in range(min(len(OPENING) - 1, len(said)), 0, -1):
            if OPENING.startswith(said[-length:]):
                said = said[:-length]
                break
    return said.rstrip()


def _parsed(body: str) -> tuple[str, str]:
    """Name and arguments (JSON) of a call; what is none, as a JSON string, which no tool takes."""
    try:
        call = json.loads(body)
        name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", json.dumps(body, ensure_ascii=False)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return "", json.dumps(body, ensure_ascii=False)
    return name, json.dumps(arguments, ensure_ascii=False)
