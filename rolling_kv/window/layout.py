"""The token-level layout of a prompt: instruction, documents and query, each tokenised on its own.

The model's own chat template frames them. The template is rendered once with marks in the places of the
instruction, the documents and the query; the text around the marks becomes part of the first and the last
segment. So the pieces, put together, are exactly what the template renders, and the ids of a document never
depend on its neighbours. Text that spells a special token is tokenised as ordinary text, so that a document
cannot end the turn that it stands in. The blank that SentencePiece-style tokenizers put before a text goes to
the first text of the prompt alone, and never to a document or a query, wherever it stands.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from rolling_kv.errors import ConfigError, TemplateError, UnknownDocumentError
from rolling_kv.window.document import Document, content_hash, require_characters, require_text

SegmentKind = Literal["instruction", "document", "query"]
Message = Mapping[str, Any]
"""As chat templates take it: `role`, `content`, and what else the template knows, such as `tool_calls`."""

_TEXT = "x"  # stands for what follows the head: a document or a query, which never begin with white space
_INSTRUCTION, _DOCUMENTS, _QUERY = "rkvmark1instruction1", "rkvmark2documents2", "rkvmark3query3"


class Tokenizer(Protocol):
    """What a layout needs of a tokenizer (`engine/tokenizer.py` wraps the one of transformers)."""

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """What the tokenizer puts before a plain text, such as a BOS id."""
        ...

    def encode(self, text: str, *, special: bool, first: bool = False) -> tuple[int, ...]:
        """Token ids of `text`, nothing added; special tokens are recognised only when `special`.

        Only what is `first` in a prompt may get the blank that some tokenizers put before a text.
        """
        ...

    def offsets(self, text: str) -> tuple[tuple[int, int], ...]:
        """For each token of `encode(text, special=False)`, the characters that it stands for, [from, to)."""
        ...

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The spellings of all special tokens."""
        ...

    def spells_special_token(self, text: str) -> bool:
        """Whether `text` contains the spelling of a special token."""
        ...

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Message] = (), generation: bool = True
    ) -> str | None:
        """The chat template over `messages`; None without a template.

        Equal messages are rendered equally on every day.

        Args:
            tools: definitions that the template may list.
            generation: whether the generation prompt follows.

        Raises:
            TemplateError: the template does not take these messages.
        """
        ...


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of prompt tokens. `name` is the document's id, or the kind; `stream` as in `Document`."""

    kind: SegmentKind
    name: str
    token_ids: tuple[int, ...]
    start: int
    stream: tuple[tuple[int, ...], ...] = ()

    @property
    def stop(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The segments of one prompt in order; empty ones are left out."""

    segments: tuple[Segment, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for segment in self.segments for token in segment.token_ids)

    def __len__(self) -> int:
        return self.segments[-1].stop if self.segments else 0

    @property
    def context(self) -> tuple[Segment, ...]:
        """All but the query."""
        return tuple(segment for segment in self.segments if segment.kind != "query")


def side_by_side(pieces: Iterable[Segment]) -> Prompt:
    """The prompt that `pieces` make, one after the other, wherever they say they start."""
    segments: list[Segment] = []
    start = 0
    for piece in pieces:
        if piece.token_ids:
            segments.append(replace(piece, start=start))
            start += len(piece.token_ids)
    return Prompt(segments=tuple(segments))


@dataclass(frozen=True, slots=True)
class LayoutSource:
    """What a layout is made from, besides the model's tokenizer; `layout_from` makes it again.

    Args:
        kind: `documents` (`PromptLayout`) or `conversation` (`ConversationLayout`).
        tools: of a conversation.
    """

    kind: Literal["documents", "conversation"]
    instruction: str
    tools: tuple[Message, ...] = ()

    @property
    def key(self) -> str:
        """Equal for equal sources."""
        return json.dumps([self.kind, self.instruction, list(self.tools)], sort_keys=True, default=dict)


class Layout(Protocol):
    """How a session's window becomes a prompt: the instruction, what the window holds, and the query."""

    @property
    def source(self) -> LayoutSource:
        """What it is made from."""
        ...

    def document(self, content: Any, *, document_id: str, pinned: bool = False) -> Document:
        """`content` tokenised as one segment, the same wherever it stands."""
        ...

    def prompt(self, documents: Sequence[Document], query: Any, *, answer_prefix: str = "") -> Prompt:
        """The prompt over `documents`, with its query, or without one (None) to see what can be stored."""
        ...

    def labelled(
        self, documents: Sequence[Document], prompt: Prompt, labels: Sequence[tuple[str, int, int]]
    ) -> frozenset[int]:
        """The prompt positions of the tokens that hold labelled characters: (document id, first, last + 1).

        Raises:
            UnknownDocumentError, ConfigError: there is no such document, or no such range in it.
        """
        ...


class PromptLayout:
    """Lays out a window and a query for one model and one instruction.

    Args:
        tokenizer: the model's.
        instruction: stands before the documents, as the system message where the template has that role.

    Raises:
        TemplateError: the chat template does not keep instruction, documents and query in this order.
        ConfigError: the instruction holds a lone surrogate.
    """

    def __init__(self, tokenizer: Tokenizer, *, instruction: str) -> None:
        self._tokenizer = tokenizer
        require_characters(instruction, what="instruction", error=ConfigError)
        self._instruction = instruction.strip()
        frame = _frame(tokenizer, instructed=bool(self._instruction))
        self._tail = frame.tail
        self._instruction_ids = self._framed_ids(frame)

    @property
    def source(self) -> LayoutSource:
        """What this layout is made from."""
        return LayoutSource(kind="documents", instruction=self._instruction)

    def document(self, text: str, *, document_id: str, pinned: bool = False) -> Document:
        """`text` tokenised as one segment: itself without surrounding white space, and a line break."""
        ids = self._encode(require_text(text) + "\n")
        return Document(
            id=document_id, text=text, token_ids=ids, content_hash=content_hash(text), pinned=pinned
        )

    def prompt(self, documents: Sequence[Document], query: str | None, *, answer_prefix: str = "") -> Prompt:
        """The prompt over `documents`, with its query, or without one (None) to see what can be stored."""
        pieces = [Segment("instruction", "instruction", self._instruction_ids, 0)]
        pieces += [Segment("document", one.id, one.token_ids, 0, one.stream) for one in documents]
        if query is not None:
            pieces.append(Segment("query", "query", self._query_ids(query, answer_prefix), 0))
        return side_by_side(pieces)

    def labelled(
        self, documents: Sequence[Document], prompt: Prompt, labels: Sequence[tuple[str, int, int]]
    ) -> frozenset[int]:
        """The prompt positions of the tokens that hold labelled characters.

        Args:
            labels: (document id, first character, character after the last) in the document's own text.

        Raises:
            UnknownDocumentError, ConfigError: there is no such document, or no such range in it.
        """
        texts = {document.id: document.text for document in documents}
        starts = {segment.name: segment.start for segment in prompt.segments if segment.kind == "document"}
        positions: set[int] = set()
        for name, first, stop in labels:
            if name not in texts:
                raise UnknownDocumentError(
                    f"A label names the document {name!r}, which is not in the window of {len(texts)}."
                )
            text = texts[name]
            if not 0 <= first < stop <= len(text):
                raise ConfigError(
                    f"A label names the characters {first} to {stop} of {name!r}, which has {len(text)}."
                )
            cut = len(text) - len(text.lstrip())
            offsets = self._tokenizer.offsets(require_text(text) + "\n")
            positions |= {
                starts[name] + index
                for index, (low, high) in enumerate(offsets)
                if low < stop - cut and high > first - cut
            }
        return frozenset(positions)

    def _query_ids(self, query: str, answer_prefix: str) -> tuple[int, ...]:
        if not isinstance(query, str):
            raise TypeError(
                f"A query is text (str), not {type(query).__name__}; messages need a ConversationLayout."
            )
        text = query.strip()
        if not text:
            raise ConfigError("The query is empty; ask something, for example session.ask('What changed?').")
        require_characters(text, what="query", error=ConfigError)
        require_characters(answer_prefix, what="answer prefix", error=ConfigError)
        if not self._tokenizer.spells_special_token(text + answer_prefix):  # nor across the two
            return self._tokenizer.encode(text + self._tail + answer_prefix, special=True)
        tail = self._tokenizer.encode(self._tail, special=True)
        return self._encode(text) + tail + self._encode(answer_prefix)

    def _framed_ids(self, frame: _Frame) -> tuple[int, ...]:
        prefix = () if frame.templated else self._tokenizer.prefix_ids
        if not self._tokenizer.spells_special_token(self._instruction):
            return prefix + self._encode_head(frame.head.replace(_INSTRUCTION, self._instruction), first=True)
        before, after = frame.head.split(_INSTRUCTION)
        before_ids = self._tokenizer.encode(before, special=True, first=True)
        instruction_ids = self._encode(self._instruction, first=not before)
        return prefix + before_ids + instruction_ids + self._encode_head(after)

    def _encode_head(self, text: str, *, first: bool = False) -> tuple[int, ...]:
        """Ids of `text` as they are before other text: white space splits differently at an end."""
        if not text:
            return ()
        following = self._tokenizer.encode(_TEXT, special=False)
        ids = self._tokenizer.encode(text + _TEXT, special=True, first=first)
        if ids[-len(following) :] == following:
            return ids[: -len(following)]
        return self._tokenizer.encode(text, special=True, first=first)

    def _encode(self, text: str, *, first: bool = False) -> tuple[int, ...]:
        return self._tokenizer.encode(text, special=False, first=first) if text else ()


@dataclass(frozen=True, slots=True)
class _Frame:
    """What stands before the documents (the instruction's mark in it) and what follows the query."""

    head: str
    tail: str
    templated: bool


def _frame(tokenizer: Tokenizer, *, instructed: bool) -> _Frame:
    together = _DOCUMENTS + _QUERY
    candidates: list[list[Message]] = [[{"role": "user", "content": together}]]
    if instructed:
        candidates = [
            [{"role": "system", "content": _INSTRUCTION}, {"role": "user", "content": together}],
            [{"role": "user", "content": f"{_INSTRUCTION}\n\n{together}"}],
        ]
    refusals = []
    for messages in candidates:
        try:
            rendered = tokenizer.render(messages)
        except TemplateError as refusal:
            refusals.append(str(refusal))
            continue
        if rendered is None:
            return _Frame(head=f"{_INSTRUCTION}\n\n" if instructed else "", tail="", templated=False)
        head, found, tail = rendered.partition(together)
        in_order = head.count(_INSTRUCTION) == int(instructed) and _INSTRUCTION not in tail
        if found and in_order and together not in tail:
            return _Frame(head=head, tail=tail, templated=True)
        refusals.append("it moves, repeats or drops the content of a message")
    raise TemplateError(
        "The model's chat template cannot carry a window of documents: "
        + "; ".join(refusals)
        + ". Use a model whose template keeps message contents in order, or a tokenizer without a template."
    )
