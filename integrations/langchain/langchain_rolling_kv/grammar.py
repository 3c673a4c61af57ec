"""Answers of a form: tool calls and JSON that keep to their schema whatever the model would have said.

llguidance turns a schema into a mask over the vocabulary at every token, so that even a model without any
idea of tools makes a well-formed call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLTokenizer

from langchain_rolling_kv.errors import SchemaError
from langchain_rolling_kv.tool_calls import CLOSING, OPENING

if TYPE_CHECKING:
    import torch
    from llguidance._lib import JsonCompileOptions

    from rolling_kv.engine.host import TransformersHost

# One spelling, so that a small model cannot lose itself in white space.
_SPELLING: JsonCompileOptions = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}


def calls_grammar(tools: Sequence[Mapping[str, Any]]) -> str:
    """One call of one of `tools`, in the spelling of `tool_calls`."""
    rules = [f"{json.dumps(OPENING)} {_newline()} ({' | '.join(f'tool_{n}' for n in range(len(tools)))})"]
    rules[0] = f"start: {rules[0]} {_newline()} {json.dumps(CLOSING)}"
    for number, tool in enumerate(tools):
        function = tool["function"]
        arguments: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
        arguments |= function.get("parameters") or {}
        definitions: dict[str, Any] = {
            key: arguments.pop(key) for key in ("$defs", "definitions") if key in arguments
        }
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, "arguments": arguments},
            "required": ["name", "arguments"],
            "additionalProperties": False,
            "x-guidance": _SPELLING,
            **definitions,
        }
        rules.append(f"tool_{number}: %json {json.dumps(schema)}")
    return LLMatcher.grammar_from_lark("\n".join(rules))


def text_grammar() -> str:
    """Text without the mark-up of calls and results."""
    return LLMatcher.grammar_from_lark("start: TEXT\nTEXT: /(?s:.*)/ & ~/(?s:.*<tool_.*)/")


def json_grammar(schema: Mapping[str, Any]) -> str:
    """JSON of `schema`."""
    return LLMatcher.grammar_from_json_schema(dict(schema), overrides=_SPELLING)


def schema_instruction(schema: Mapping[str, Any]) -> str:
    """What tells a model of the schema of its answer."""
    return f"Answer with JSON of this schema:\n{json.dumps(schema, ensure_ascii=False)}"


class GrammarGuide:
    """A guide (`rolling_kv.options.Guide`) that keeps one answer to a grammar."""

    def __init__(self, vocabulary: LLTokenizer, grammar: str) -> None:
        self._matcher = LLMatcher(vocabulary, grammar)
        self._consumed = 0
        if self._matcher.is_error():
            raise SchemaError(
                f"The schema cannot be kept to: {self._matcher.get_error()}. Use a simpler schema, or let "
                "the model answer freely and parse what it says."
            )

    def __call__(self, token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        import torch

        self._matcher.consume_tokens(list(token_ids[self._consumed :]))
        self._consumed = len(token_ids)
        mask = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
        allowed = torch.zeros(len(logits), dtype=torch.bool)
        allowed[: len(mask)] = mask[: len(logits)] > 0
        return logits.masked_fill(~allowed.to(logits.device), -torch.inf)


def vocabulary_of(engine: TransformersHost) -> LLTokenizer:
    """The engine's vocabulary as llguidance reads it; it takes a second, so keep it."""
    return LLTokenizer(engine.tokenizer.definition, eos_token=sorted(engine.eos_ids))


def _newline() -> str:
    return json.dumps("\n")
