"""What a call asks of an answer's form, and what ends it: its calls, and the account of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from langchain_core.messages import AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGenerationChunk

from langchain_rolling_kv.grammar import calls_grammar, json_grammar, text_grammar
from rolling_kv import Answer
from rolling_kv.errors import ConfigError


def form_of(
    tools: Sequence[Mapping[str, Any]], tool_choice: str | None, schema: Mapping[str, Any] | None
) -> str | None:
    """The grammar that the answer must keep to, if any."""
    if schema is not None:
        return json_grammar(schema)
    if tools and tool_choice == "none":
        return text_grammar()
    if tools and tool_choice not in (None, "auto"):
        return calls_grammar([one for one in tools if tool_choice in ("any", one["function"]["name"])])
    return None


def choice_of(choice: str | bool | Mapping[str, Any] | None, names: Sequence[str]) -> str | None:
    if isinstance(choice, Mapping):  # as OpenAI has it, and as Anthropic has it
        choice = choice.get("function", choice).get("name") or choice.get("type")
    if choice in (None, False, "auto", "none"):
        return "none" if choice == "none" else None
    if choice in (True, "any", "required"):
        return "any"
    if choice not in names:
        raise ConfigError(
            f"tool_choice is {choice!r}; expected auto, any, none, or one of the tools: {', '.join(names)}."
        )
    return str(choice)


def last_chunk(
    answer: Answer, *, text: str, calls: Sequence[Any], written: Mapping[str, int], model_name: str
) -> ChatGenerationChunk:
    """What ends an answer: its calls, and the account of it.

    `cache_read` are prompt tokens whose KV was there before the call and was kept, `cache_creation` those
    whose KV it had to compute and store first: together what `rolling_kv.Usage` counts as prefix and reused.
    The whole of that usage is in `response_metadata["rolling_kv"]`.

    Args:
        written: tokens of what the call stored, by store key, be it in the prompt or not.
    """
    usage = answer.usage
    reason = {"eos": "stop", "stop": "stop", "length": "length"}[answer.finish_reason]
    metadata = {
        "model_name": model_name,
        "finish_reason": "tool_calls" if calls else reason,
        "rolling_kv": asdict(usage)
        | {
            "degraded": list(usage.degraded),
            "logits_fingerprint": answer.trace.logits_fingerprint,
        },
    }
    kept = usage.prefix + usage.reused
    created = min(kept, sum(written.get(key, 0) for key in answer.trace.lineages))
    message = AIMessageChunk(
        content=text,
        tool_call_chunks=list(calls),
        chunk_position="last",
        response_metadata=metadata,
        usage_metadata=UsageMetadata(
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.output,
            total_tokens=usage.prompt_tokens + usage.output,
            input_token_details=InputTokenDetails(cache_read=kept - created, cache_creation=created),
        ),
    )
    return ChatGenerationChunk(message=message, generation_info={"finish_reason": metadata["finish_reason"]})
