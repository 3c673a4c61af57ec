"""The token-level layout of a conversation: every message is a segment, so past messages roll too.

Each message is framed by the chat template as a turn of its own, whatever stands beside it, and tokenised on
its own: a message has the same ids anywhere, two messages of one role may follow each other even where the
template as a whole refuses that, and a conversation without its head keeps the KV of its rest. Frames are
read off the template once, by rendering it over marks. Text that spells a special token stays text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rolling_kv.errors import ConfigError, TemplateError
from rolling_kv.window.document import Document, content_hash, require_text
from rolling_kv.window.layout import (
    LayoutSource,
    Message,
    Prompt,
    PromptLayout,
    Segment,
    Tokenizer,
    side_by_side,
)

_CUT = "rkvcut"  # put into a spelled special token, and taken out again when all is rendered
_FIRST, _SECOND, _THIRD = "rkvmark1first1", "rkvmark2second2", "rkvmark3third3"
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "probe", "arguments": {"key": _SECOND}}}],
}
_REMEMBERED = 4096  # messages whose ids are kept, since every call lays out the whole conversation


class ConversationLayout:
    """Lays out messages for one model, one instruction and one set of tools.

    Args:
        tokenizer: the model's. Without a chat template turns read "User: ..." and "Assistant: ...".
        instruction: the system message, or a user turn of its own where the template has no such role.
        tools: definitions for a template that lists them; see `carries_tools`.

    Raises:
        TemplateError: the template does not keep messages in order, or cannot list the tools.
    """

    def __init__(self, tokenizer: Tokenizer, *, instruction: str = "", tools: Sequence[Message] = ()) -> None:
        self._tokenizer = tokenizer
        self._instruction = instruction
        self._tools = tools
        self._frames = _frames(tokenizer)
        if tools:
            self._frames["tool"] = _tool_frame(tokenizer, self._frames, tools)
        head = self._head(self._cut(instruction.strip()))
        self._head_ids = _prefix_ids(tokenizer) + self._encode(head, first=True)
        self._tail = _tail(tokenizer, self._frames["user"])
        self._turn_ids = lru_cache(maxsize=_REMEMBERED)(self._encode_turn)

    @property
    def source(self) -> LayoutSource:
        """What this layout is made from."""
        return LayoutSource(kind="conversation", instruction=self._instruction, tools=tuple(self._tools))

    def document(self, content: str | Message, *, document_id: str, pinned: bool = False) -> Document:
        """A message as one segment; a text is a user's message. The document's text is the message as JSON.

        Raises:
            EmptyDocumentError, WindowError: it has no text, or text that no tokenizer takes.
            TemplateError: the template has no such role.
        """
        text = _as_json(content)
        return Document(
            id=document_id,
            text=text,
            token_ids=self._turn_ids(text),
            content_hash=content_hash(text),
            pinned=pinned,
        )

    def prompt(
        self, documents: Sequence[Document], query: str | Message | None, *, answer_prefix: str = ""
    ) -> Prompt:
        """The prompt over past messages, with the newest one as its query, or without one (None)."""
        pieces = [Segment("instruction", "instruction", self._head_ids, 0)]
        pieces += [Segment("document", one.id, one.token_ids, 0, one.stream) for one in documents]
        if query is not None:
            begun = self._tokenizer.encode(self._tail, special=True)
            if answer_prefix:
                begun += self._tokenizer.encode(answer_prefix, special=False)
            pieces.append(Segment("query", "query", self._turn_ids(_as_json(query)) + begun, 0))
        return side_by_side(pieces)

    def labelled(
        self, documents: Sequence[Document], prompt: Prompt, labels: Sequence[tuple[str, int, int]]
    ) -> frozenset[int]:
        """Nothing is labelled in a conversation.

        Raises:
            ConfigError: there are labels.
        """
        if labels:
            raise ConfigError("Messages cannot be labelled. Leave labels out, or use a window of documents.")
        return frozenset()

    def _head(self, instruction: str) -> str:
        """What stands before the first turn: what the template begins with, and the instruction."""
        user = self._frames["user"]
        messages: list[Message] = [{"role": "user", "content": _SECOND}]
        if instruction:
            try:
                system: Message = {"role": "system", "content": _FIRST}
                head = _head(self._tokenizer, [system, *messages], user, self._tools)
                if head.count(_FIRST) == 1:
                    return head.replace(_FIRST, instruction)
            except TemplateError:
                pass  # it has no such role, or folds it into the first turn
            return _head(self._tokenizer, messages, user, self._tools) + user.around(instruction)
        return _head(self._tokenizer, messages, user, self._tools)

    def _encode_turn(self, text: str) -> tuple[int, ...]:
        return self._encode(self._turn(self._cut(json.loads(text))))

    def _turn(self, message: Message) -> str:
        role, content = message["role"], message.get("content") or ""
        if role not in self._frames:
            raise TemplateError(
                f"The layout has no turn for the role {role!r}; expected one of {', '.join(self._frames)}. "
                "Give the message another role, or the layout tools for the role 'tool'."
            )
        if message.get("tool_calls"):
            rendered = _render(
                self._tokenizer, [{"role": "user", "content": _FIRST}, message], tools=self._tools
            )
            return rendered.partition(_FIRST)[2].removeprefix(self._frames["user"].closing)
        return self._frames[role].around(content.strip())

    def _cut(self, value: Any) -> Any:
        """`value` with a cut in every special token that a text in it spells."""
        if isinstance(value, str):
            for token in self._tokenizer.special_tokens:
                value = value.replace(token, f"{token[:1]}{_CUT}{token[1:]}")
            return value
        if isinstance(value, dict):
            return {key: self._cut(one) for key, one in value.items()}
        return [self._cut(one) for one in value] if isinstance(value, list) else value

    def _encode(self, text: str, *, first: bool = False) -> tuple[int, ...]:
        ids: tuple[int, ...] = ()
        for piece in filter(None, text.split(_CUT)):
            ids += self._tokenizer.encode(piece, special=True, first=first and not ids)
        return ids


def layout_from(source: LayoutSource, tokenizer: Tokenizer) -> PromptLayout | ConversationLayout:
    """The layout that `source` describes, for a tokenizer.

    Raises:
        TemplateError, ConfigError: as when it is made directly.
    """
    if source.kind == "documents":
        return PromptLayout(tokenizer, instruction=source.instruction)
    return ConversationLayout(tokenizer, instruction=source.instruction, tools=source.tools)


def carries_tools(tokenizer: Tokenizer, tools: Sequence[Message]) -> bool:
    """Whether the chat template lists `tools`, calls and results so that each can be a segment."""
    try:
        layout = ConversationLayout(tokenizer, instruction=_FIRST, tools=tools)
        turn = layout._turn(_CALL)
    except TemplateError:
        return False
    names = [tool["function"]["name"] for tool in tools]
    return all(name in layout._head(_FIRST) for name in names) and "probe" in turn and _SECOND in turn


@dataclass(frozen=True, slots=True)
class _Frame:
    """What the template puts around the content of a turn."""

    opening: str
    closing: str

    def around(self, content: str) -> str:
        return self.opening + content + self.closing


def _frames(tokenizer: Tokenizer) -> dict[str, _Frame]:
    """The turns of user and assistant, read off a conversation of marks."""
    user, assistant = {"role": "user", "content": _FIRST}, {"role": "assistant", "content": _SECOND}
    short = _render(tokenizer, [user, assistant])
    whole = _render(tokenizer, [user, assistant, {"role": "user", "content": _THIRD}])
    if any(whole.count(mark) != 1 for mark in (_FIRST, _SECOND, _THIRD)):
        raise TemplateError(
            "The model's chat template moves, repeats or drops the content of a message. Use a model whose "
            "template keeps message contents in order, or a tokenizer without a template."
        )
    closings = whole.partition(_THIRD)[2], short.partition(_SECOND)[2]
    between = (
        whole.partition(_FIRST)[2].partition(_SECOND)[0],
        whole.partition(_SECOND)[2].partition(_THIRD)[0],
    )
    return {
        "user": _Frame(opening=between[1].removeprefix(closings[1]), closing=closings[0]),
        "assistant": _Frame(opening=between[0].removeprefix(closings[0]), closing=closings[1]),
    }


def _tool_frame(tokenizer: Tokenizer, frames: dict[str, _Frame], tools: Sequence[Message]) -> _Frame:
    """The turn of a tool's result, which stands after a call."""
    result = {"role": "tool", "name": "probe", "content": _THIRD}
    whole = _render(tokenizer, [{"role": "user", "content": _FIRST}, _CALL, result], tools=tools)
    before, found, closing = whole.partition(_THIRD)
    called, ended, opening = before.rpartition(frames["assistant"].closing)
    if not found or not ended or _SECOND not in called:
        raise TemplateError("The model's chat template has no turns for tool calls and their results.")
    return _Frame(opening=opening, closing=closing)


def _head(tokenizer: Tokenizer, messages: list[Message], user: _Frame, tools: Sequence[Message]) -> str:
    before, found, closing = _render(tokenizer, messages, tools=tools).partition(user.around(_SECOND))
    if not found or closing:
        raise TemplateError(
            "The model's chat template mixes what stands before the first turn with that turn, so the two "
            "cannot be segments. Use a model whose template keeps them apart."
        )
    return before


def _tail(tokenizer: Tokenizer, user: _Frame) -> str:
    """The generation prompt."""
    whole = _render(tokenizer, [{"role": "user", "content": _SECOND}], generation=True)
    return whole.partition(_SECOND)[2].removeprefix(user.closing)


def _prefix_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """A template spells its own BOS token; a plain transcript gets the tokenizer's."""
    templated = tokenizer.render([{"role": "user", "content": _FIRST}], generation=False) is not None
    return () if templated else tokenizer.prefix_ids


def _render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Message] = (),
    generation: bool = False,
) -> str:
    rendered = tokenizer.render(messages, tools=tools, generation=generation)
    if rendered is not None:
        return rendered
    if tools:
        raise TemplateError("The model has no chat template that could list tools.")
    turns = [
        f"{message['content']}\n\n"
        if message["role"] == "system"
        else f"{message['role'].capitalize()}: {message['content']}\n"
        for message in messages
    ]
    return "".join(turns) + ("Assistant:" if generation else "")


def _as_json(content: str | Message) -> str:
    """A message in one canonical spelling, which is what its hash is of."""
    message = {"role": "user", "content": content} if isinstance(content, str) else dict(content)
    if not isinstance(message.get("role"), str):
        raise ConfigError(f"A message has a role and a content, as chat templates take it; got {content!r}.")
    if not message.get("tool_calls"):
        require_text(message.get("content") or "")
    text = json.dumps(message, ensure_ascii=False, sort_keys=True)
    return require_text(text)
