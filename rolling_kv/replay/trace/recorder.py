"""Recording a session: from its hooks to the lines of a trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

from rolling_kv.hooks import Answered, WindowChanged, observe_sessions
from rolling_kv.replay.trace.file import TraceFile
from rolling_kv.replay.trace.lines import (
    DocumentLine,
    Entry,
    Header,
    LayoutLine,
    Line,
    ModelLine,
    RequestLine,
    SelectionLine,
    TimingLine,
    UsageLine,
    WindowLine,
    encoded,
    entries_digest,
    entry_of,
    text_hash,
    tokens_digest,
)
from rolling_kv.window import Document, LayoutSource

if TYPE_CHECKING:
    from rolling_kv.config import SessionConfig
    from rolling_kv.hooks import Hooks
    from rolling_kv.kv import ModelIdentity
    from rolling_kv.session import RollingSession

_PLACES = {"store", "quota", "ttl", "memory_limit", "trace", "trace_text", "instruction"}
_TEXTS = ("answer_prefix", "stop")  # options whose values are texts of the user's


class Recorder:
    """Writes what one session does to a trace, until it is closed.

    Args:
        path: of the trace; a session before may have recorded to it.
        text: whether texts and token ids are recorded, or their hashes alone.
        now: seconds since the epoch.

    Raises:
        TraceError
    """

    def __init__(
        self,
        path: Path,
        *,
        hooks: Hooks,
        identity: ModelIdentity,
        source: LayoutSource,
        config: SessionConfig,
        documents: Sequence[Document] = (),
        text: bool = True,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._text = text
        self._now = now
        self._started = now()
        self._part = count()
        self._about = (identity, source, config)
        self._sum = ""
        self._headed = False  # whether the file that is open begins with a header of ours
        self._closed = False
        self._window: tuple[Document, ...] | None = None  # that the file has come to; None: not known
        self._written: set[str] = set()  # hashes of the contents that are in this file
        self._lock = RLock()  # answers may be read in threads of their own
        self._file = TraceFile(path)
        self._registrations = (hooks.on(WindowChanged, self._changed), hooks.on(Answered, self._answered))
        try:
            self._begin(documents)
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> Path:
        return self._file.path

    def close(self) -> None:
        """Records no more. Closing twice is harmless."""
        for registration in self._registrations:
            registration.remove()
        with self._lock:
            self._closed = True
            self._file.close()

    def _begin(self, documents: Sequence[Document]) -> None:
        """The beginning of a file that can be read on its own: a header, and what the window holds."""
        identity, source, config = self._about
        self._written, self._sum, self._window, self._headed = set(), "", (), False
        settings = config.model_dump(mode="json", exclude=_PLACES)
        settings["namespace"] = self._told(config.namespace)
        header = Header(
            text=self._text,
            started=self._started,
            part=next(self._part),
            model=ModelLine(**asdict(identity)),
            layout=LayoutLine(
                kind=source.kind,
                instruction=self._told(source.instruction),
                tools=tuple(_plain(tool) if self._text else text_hash(repr(tool)) for tool in source.tools),
            ),
            settings=settings,
        )
        lines: list[Line] = [header]
        if documents:
            lines += self._window_lines("snapshot", tuple(documents))
        self._write(lines)
        self._headed = True

    def _changed(self, event: WindowChanged) -> None:
        with self._lock:
            if self._closed:
                return
            self._continue(event.before)
            self._write(self._window_lines(event.kind, event.after))

    def _answered(self, event: Answered) -> None:
        with self._lock:
            if self._closed:
                return
            self._continue(event.call.documents if self._window is None else self._window)
            call, answer = event.call, event.answer
            entries = [entry_of(document, text=self._text) for document in call.documents]
            held = [entry_of(document, text=self._text) for document in self._window or ()]
            line = RequestLine(
                at=self._now(),
                number=call.number,
                query=_plain(call.query) if self._text else text_hash(_spelled(call.query)),
                options=self._options(call.options),
                window=None if entries == held else tuple(entries),
                window_digest=entries_digest(entries),
                prompt_digest=tokens_digest(call.prompt.token_ids),
                lineages=answer.trace.lineages,
                selection=SelectionLine(
                    **asdict(answer.trace.selection), runs=tuple(_runs(answer.trace.selected))
                ),
                usage=UsageLine(
                    **asdict(answer.usage) | {"degraded": tuple(map(self._told, answer.usage.degraded))}
                ),
                timing=TimingLine(**asdict(answer.timing)),
                prerolled=answer.trace.prerolled,
                logits_fingerprint=answer.trace.logits_fingerprint,
                finish_reason=answer.finish_reason,
                answer=self._told(answer.text),
                answer_ids=answer.token_ids if self._text else None,
                answer_digest=tokens_digest(answer.token_ids),
                margins=answer.trace.margins,
            )
            self._write([*self._document_lines(call.documents), line])

    def _continue(self, window: tuple[Document, ...]) -> None:
        """Goes on in a new file where the old one was taken away, and with `window` where it is not known."""
        if self._file.replaced() or not self._headed:
            self._begin(window)
        elif window != self._window:  # a change was undone, because a later hook refused it
            self._write(self._window_lines("snapshot", window))

    def _window_lines(self, change: Any, after: tuple[Document, ...]) -> list[Line]:
        """The contents that are new in `after`, and how the window came to it."""
        known = () if change == "snapshot" else self._window or ()
        before = [entry_of(one, text=self._text) for one in known]
        entries = [entry_of(one, text=self._text) for one in after]
        removed, inserted = _difference(before, entries)
        self._window = after
        line = WindowLine(
            at=self._now(),
            change=change,
            removed=removed,
            inserted=inserted,
            digest=entries_digest(entries),
        )
        return [*self._document_lines(after), line]

    def _document_lines(self, documents: Iterable[Document]) -> list[Line]:
        lines: list[Line] = []
        for document in documents:
            if document.content_hash in self._written:
                continue
            self._written.add(document.content_hash)
            lines.append(
                DocumentLine(
                    hash=document.content_hash,
                    tokens=document.tokens,
                    text=document.text if self._text else None,
                    token_ids=document.token_ids if self._text else None,
                )
            )
        return lines

    def _write(self, lines: Sequence[Line]) -> None:
        data, digest = b"", self._sum
        for line in lines:
            one, digest = encoded(line, after=digest)
            data += one
        try:
            self._file.write(data)
        except BaseException:
            self._written, self._window = set(), None  # what the file holds is not known: say all again
            raise
        self._sum = digest

    def _options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        told = {name: _plain(value) for name, value in options.items() if name != "guide"}
        if options.get("guide") is not None:
            told["guide"] = True
        if not self._text:
            told.update({name: text_hash(_spelled(told[name])) for name in _TEXTS if name in told})
            told.pop("labels", None)
        return told

    def _told(self, text: str) -> str:
        return text if self._text else text_hash(text)


@contextmanager
def record_sessions(
    folder: str | Path, *, text: bool = True, now: Callable[[], float] = time.time
) -> Iterator[list[Path]]:
    """Records every session of this process that is opened meanwhile, whatever opens it, as LangChain's are.

    Args:
        folder: gets `session-0.jsonl`, `session-1.jsonl`, ... in the order in which sessions are opened.
        text: as in `Recorder`.

    Returns:
        The paths, of the sessions so far. All are closed at the end.
    """
    recorders: list[Recorder] = []
    paths: list[Path] = []
    numbers = count()

    def record(session: RollingSession) -> None:
        path = Path(folder) / f"session-{next(numbers)}.jsonl"
        recorders.append(recorder_of(session, path, text=text, now=now))
        paths.append(path)

    try:
        with observe_sessions(record):
            yield paths
    finally:
        for recorder in recorders:
            recorder.close()


def recorder_of(
    session: RollingSession, path: str | Path, *, text: bool = True, now: Callable[[], float] = time.time
) -> Recorder:
    """A recorder of a session that is open, from now on; close it."""
    return Recorder(
        Path(path).expanduser(),
        hooks=session.hooks,
        identity=session.engine.identity,
        source=session.layout_source,
        config=session.config,
        documents=session.documents,
        text=text,
        now=now,
    )


def _difference(
    before: Sequence[Entry], after: Sequence[Entry]
) -> tuple[tuple[str, ...], tuple[tuple[int, Entry], ...]]:
    """Ids to remove, and entries to insert at their places then, that lead from one window to the other."""
    kept = set(before) & set(after)
    if [one for one in before if one in kept] != [one for one in after if one in kept]:
        kept = set()  # put in another order
    removed = tuple(one.id for one in before if one not in kept)
    return removed, tuple((place, one) for place, one in enumerate(after) if one not in kept)


def _runs(positions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending positions as runs, [from, to)."""
    start: int | None = None
    last = -1
    for position in positions:
        if start is not None and position != last + 1:
            yield start, last + 1
            start = None
        start, last = position if start is None else start, position
    if start is not None:
        yield start, last + 1


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def _plain(value: Any) -> Any:
    """`value` as plain JSON values."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(one) for one in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
