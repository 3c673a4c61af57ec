"""A history: the requests of an agent, each with its window, from a trace or from a workload."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from rolling_kv.errors import ConfigError, TraceError, TraceMismatchError, TraceTextError
from rolling_kv.kv import ModelIdentity
from rolling_kv.replay.trace import RecordedDocument, RecordedRequest, Recording
from rolling_kv.replay.trace.lines import Header, ModelLine
from rolling_kv.window import LayoutSource
from rolling_kv.window.layout import Message
from rolling_kv.workloads import LabelledRequest

# Options that decide how a prompt is prefilled, which arms decide instead.
DECIDED = ("policy", "ratio", "selection_layer", "measure_deviation")


@dataclass(frozen=True, slots=True)
class Shown:
    """A document of a window: its text (a message as JSON), and its id (None: made from the content)."""

    text: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked over a window.

    Args:
        options: of `ask`.
    """

    query: str | Message
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HistoryRequest:
    """One request of a history.

    Args:
        number: from 0, in the order in which requests were made.
        previous, previous_question: the window at the request before, and what was asked over it.
        expected: the right answer; empty when it is not known.
        prompt_digest: of the prompt as it was recorded; None when it was not.
        guided: whether its answer was kept to a form when it was recorded, which a replay cannot do.
    """

    number: int
    layout: LayoutSource
    documents: tuple[Shown, ...]
    question: Question
    previous: tuple[Shown, ...] = ()
    previous_question: Question | None = None
    expected: str = ""
    prompt_digest: str | None = None
    guided: bool = False

    @property
    def sampled(self) -> bool:
        """Whether its answer was sampled; a replay draws with the seed that was recorded."""
        return bool(self.question.options.get("temperature"))


@dataclass(frozen=True, slots=True)
class History:
    """Requests in the order in which they were made.

    Args:
        source: where they are from, for people.
        model: that answered them; None when they are of a workload.
        settings: of the session that was recorded; None when they are of a workload, or of several sessions
            with settings of their own.
    """

    requests: tuple[HistoryRequest, ...]
    source: str
    model: ModelLine | None = None
    settings: Mapping[str, Any] | None = None

    def __len__(self) -> int:
        return len(self.requests)

    def first(self, count: int) -> History:
        """The first `count` requests."""
        return History(self.requests[:count], self.source, self.model, self.settings)

    @property
    def digest(self) -> str:
        """xxh3-128 (hex) of all that decides a replay's prompts."""
        digest = xxhash.xxh3_128(json.dumps(self.settings, sort_keys=True).encode())
        for request in self.requests:
            parts = (
                request.layout.key,
                [[one.id, one.text] for one in request.documents],
                [[one.id, one.text] for one in request.previous],
                [request.question.query, dict(request.question.options)],
                request.previous_question and request.previous_question.query,
                request.expected,
            )
            digest.update(json.dumps(parts, sort_keys=True).encode())
        return digest.hexdigest()

    def require_model(self, identity: ModelIdentity) -> None:
        """Checks that the history is of this model; its dtype and device may be other ones.

        Raises:
            TraceMismatchError
        """
        if self.model is None:
            return
        theirs = self.model.model.partition("-")[0], self.model.tokenizer
        if theirs != (identity.values, identity.tokenizer):
            raise TraceMismatchError(
                f"{self.source} was recorded with the model {self.model.name!r}, and {identity.name!r} has "
                "other weights or another tokenizer. Replay it with the model that it was recorded with."
            )


def history_of_requests(
    requests: Sequence[LabelledRequest], *, source: str, max_new_tokens: int, stop: Sequence[str] = ("\n",)
) -> History:
    """The history of an agent that made these requests, one after the other.

    Args:
        max_new_tokens, stop: of every answer.

    Raises:
        ConfigError: there is no request.
    """
    if not requests:
        raise ConfigError(f"{source} holds no requests; expected at least one.")
    made: list[HistoryRequest] = []
    contents: dict[str, Shown] = {}
    for number, request in enumerate(requests):
        options = {
            "answer_prefix": request.answer_prefix,
            "max_new_tokens": max_new_tokens,
            "stop": list(stop),
        }
        made.append(
            HistoryRequest(
                number=number,
                layout=LayoutSource("documents", request.instruction),
                documents=tuple(contents.setdefault(text, Shown(text)) for text in request.documents),
                question=Question(request.query, options),
                previous=made[-1].documents if made else (),
                previous_question=made[-1].question if made else None,
                expected=request.expected,
            )
        )
    return History(requests=tuple(made), source=source)


def history_of_traces(recordings: Sequence[Recording]) -> History:
    """The history that was recorded, of one session after the other.

    Raises:
        TraceTextError: a trace holds hashes in the place of texts.
        TraceMismatchError: they are of several models. TraceError: nothing was answered.
    """
    made: list[HistoryRequest] = []
    headers: list[Header] = []
    for recording in recordings:
        for section in recording.sections:
            if not section.requests:
                continue
            _require_texts(section.header, recording)
            before = made[-1] if headers and _goes_on(headers[-1], section.header) else None
            headers.append(section.header)
            for request in section.requests:
                before = _request(len(made), section.header, request, before)
                made.append(before)
    source = ", ".join(str(recording.path) for recording in recordings)
    if not made:
        raise TraceError(
            f"{source or 'No trace'} holds no answered request, so that there is nothing to replay."
        )
    models = {(header.model.model, header.model.tokenizer): header.model for header in headers}
    if len(models) > 1:
        names = ", ".join(sorted({model.name for model in models.values()}))
        raise TraceMismatchError(f"{source} holds requests to several models ({names}). Replay each alone.")
    settings = [header.settings for header in headers]
    return History(
        requests=tuple(made),
        source=source,
        model=headers[0].model,
        settings=settings[0] if all(one == settings[0] for one in settings) else None,
    )


def content_of(shown: Shown, layout: LayoutSource) -> str | Message:
    """What a session with that layout takes for the document."""
    if layout.kind == "documents":
        return shown.text
    message: Message = json.loads(shown.text)
    return message


def _require_texts(header: Header, recording: Recording) -> None:
    if not header.text:
        raise TraceTextError(
            f"{recording.path} was recorded with trace_text=False: it holds hashes in the place of texts, so "
            "that its prompts cannot be made again. Record with trace_text=True to replay."
        )


def _goes_on(earlier: Header, later: Header) -> bool:
    """Whether the later file is the next one of the same session, after a rotation."""
    return (earlier.started, earlier.part + 1) == (later.started, later.part)


def _request(
    number: int, header: Header, request: RecordedRequest, before: HistoryRequest | None
) -> HistoryRequest:
    query: Any = request.line.query
    options = dict(request.line.options)
    guided = bool(options.pop("guide", False))
    layout = LayoutSource(
        kind=header.layout.kind,
        instruction=header.layout.instruction,
        tools=tuple(header.layout.tools),  # type: ignore[arg-type]  # JSON objects, as they were given
    )
    return HistoryRequest(
        number=number,
        layout=layout,
        documents=_shown(request.window),
        question=Question(query, options),
        previous=_shown(request.previous) if before is None else before.documents,
        previous_question=None if before is None else before.question,
        prompt_digest=request.line.prompt_digest,
        guided=guided,
    )


def _shown(window: Sequence[RecordedDocument]) -> tuple[Shown, ...]:
    return tuple(Shown(document.text or "", document.id) for document in window)
