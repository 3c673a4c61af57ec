"""Reading a trace: every line checked, every request with the window that it was asked over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from rolling_kv.errors import TraceDamagedError, TraceError
from rolling_kv.replay.trace.file import require_header
from rolling_kv.replay.trace.lines import (
    LINES,
    DocumentLine,
    Entry,
    Header,
    Line,
    RequestLine,
    WindowLine,
    entries_digest,
    parted,
    sum_of,
)


@dataclass(frozen=True, slots=True)
class RecordedDocument:
    """A document of a recorded window; `text` and `token_ids` are None in a trace without texts."""

    id: str
    content_hash: str
    text: str | None
    token_ids: tuple[int, ...] | None
    pinned: bool


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request as it was recorded.

    Args:
        line: what the trace says of it.
        window: what the window held.
        previous: what it held at the request before, or where its file begins.
    """

    line: RequestLine
    window: tuple[RecordedDocument, ...]
    previous: tuple[RecordedDocument, ...]


@dataclass(slots=True)
class Section:
    """What one session recorded to one file."""

    header: Header
    requests: list[RecordedRequest] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Recording:
    """A trace.

    Args:
        cut: whether its last line was cut off, and left out.
    """

    path: Path
    sections: tuple[Section, ...]
    cut: bool

    @property
    def requests(self) -> list[RecordedRequest]:
        return [request for section in self.sections for request in section.requests]


def read_trace(path: str | Path) -> Recording:
    """Reads a trace and checks it. A last line that was cut off by a kill is left out.

    Raises:
        TraceFormatError: it is no trace, or one of another version.
        TraceDamagedError: a line was altered, or is missing; it says which.
        TraceError: the file cannot be read.
    """
    path = Path(path).expanduser()
    state = _Reading(path)
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    state.cut = True
                    break
                state.take(number, line[:-1])
    except OSError as error:
        raise TraceError(
            f"{path} cannot be read: {error.strerror}. Give the file that trace= recorded to."
        ) from error
    if not state.sections:
        raise TraceError(f"{path} is empty: nothing was recorded to it.")
    return Recording(path=path, sections=tuple(state.sections), cut=state.cut)


class _Reading:
    """What is known of a trace after some of its lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sum = ""
        self._contents: dict[str, DocumentLine] = {}
        self._entries: list[Entry] = []
        self._window: tuple[RecordedDocument, ...] = ()
        self._previous: tuple[RecordedDocument, ...] = ()
        self.sections: list[Section] = []
        self.cut = False

    def take(self, number: int, text: bytes) -> None:
        where = f"{self._path}, line {number}"
        if number == 1:
            require_header(text, where=str(self._path))
        line = self._parsed(text, where=where)
        if isinstance(line, Header):
            self._contents, self._entries, self._window, self._previous = {}, [], (), ()
            self.sections.append(Section(line))
        elif isinstance(line, DocumentLine):
            self._contents[line.hash] = line
        elif isinstance(line, WindowLine):
            self._entries = _changed(self._entries, line)
            self._require(entries_digest(self._entries) == line.digest, where)
            self._window = self._documents(self._entries, where)
            if line.change == "snapshot" and not self.sections[-1].requests:
                self._previous = self._window
        else:
            window = self._window if line.window is None else self._documents(line.window, where)
            digest = entries_digest(self._entries if line.window is None else line.window)
            self._require(digest == line.window_digest, where)
            self.sections[-1].requests.append(RecordedRequest(line, window, self._previous))
            self._previous = window

    def _parsed(self, text: bytes, *, where: str) -> Line:
        found = parted(text)
        if found is None:
            raise TraceDamagedError(
                f"{where} is no line of a trace: it was altered, or is not whole. Record anew."
            )
        body, stated = found
        try:
            values: dict[str, Any] = from_json(body + b"}")
            kind = values.get("kind")
        except (ValueError, AttributeError):
            kind = None
        digest = sum_of(body, after="" if kind == "header" else self._sum)
        if digest != stated or kind not in LINES:
            raise TraceDamagedError(
                f"{where} was altered, or a line before it was added, removed or moved: its checksum is "
                f"{digest}, not {stated}. What the lines before it say holds; record anew to replay all."
            )
        self._sum = stated
        if kind == "header":
            require_header(body + b"}", where=where)
        return _validated(LINES[kind], values, where=where)

    def _documents(self, entries: Iterator[Entry] | Any, where: str) -> tuple[RecordedDocument, ...]:
        documents = []
        for entry in entries:
            content = self._contents.get(entry.hash)
            self._require(content is not None, where)
            assert content is not None
            documents.append(
                RecordedDocument(
                    id=entry.id,
                    content_hash=entry.hash,
                    text=content.text,
                    token_ids=content.token_ids,
                    pinned=entry.pinned,
                )
            )
        return tuple(documents)

    def _require(self, holds: bool, where: str) -> None:
        if not holds:
            raise TraceDamagedError(
                f"{where} does not follow from the lines before it: the window it speaks of is another one, "
                "or a document of it was never given. Record anew."
            )


def _changed(entries: list[Entry], line: WindowLine) -> list[Entry]:
    removed = set(line.removed)
    left = [] if line.change == "snapshot" else [entry for entry in entries if entry.id not in removed]
    for place, entry in line.inserted:
        left.insert(place, entry)
    return left


def _validated(kind: type[Line], values: dict[str, Any], *, where: str) -> Line:
    model: type[BaseModel] = kind
    try:
        return model.model_validate(values)  # type: ignore[return-value]  # one of LINES
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
            for problem in error.errors()
        )
        raise TraceDamagedError(f"{where} is not as expected: {problems}.") from error
