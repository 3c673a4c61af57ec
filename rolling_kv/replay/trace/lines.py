"""The lines of a trace: what each kind holds, how it is written, and how an altered one is found.

A trace is JSON lines. A section begins with a `header`, where a session begins to record or goes on in a
new file; `document` lines give texts by their content hash, each before it is first needed; `window` lines
say how the window changed, and `request` lines what was asked over it and what came of it.

The last field of a line, `sum`, is the xxh3-64 of the line before it together with the line without `sum`; a
header begins anew. So a line that was altered, added, removed or moved is found. That finds accidents and not
forgers: who can write the file can compute sums as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Literal

import numpy as np
import xxhash
from pydantic import BaseModel, ConfigDict, JsonValue

from rolling_kv.window import Document

FORMAT = "rolling_kv.trace"
VERSION = 1

_SUMMED = re.compile(rb'(\{.*),"sum":"([0-9a-f]{16})"\}', re.DOTALL)


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelLine(_Line):
    """Fields of `ModelIdentity`."""

    name: str
    model: str
    tokenizer: str
    rope: str
    dtype: str
    device: str
    runtime: str


class LayoutLine(_Line):
    """How the window became prompts; instruction and tools are hashes in a trace without texts."""

    kind: Literal["documents", "conversation"]
    instruction: str
    tools: tuple[JsonValue, ...] = ()


class Header(_Line):
    """Where a session begins to record, or goes on after the file was rotated.

    Args:
        text: whether texts and token ids are recorded, or their hashes alone.
        started: when the session began to record, in seconds since the epoch.
        part: 0, and one more with every file that it went on in.
        settings: of the session, without those that say where KV is kept.
    """

    kind: Literal["header"] = "header"
    format: Literal["rolling_kv.trace"] = "rolling_kv.trace"
    version: Literal[1] = 1
    text: bool
    started: float
    part: int
    model: ModelLine
    layout: LayoutLine
    settings: dict[str, JsonValue]


class DocumentLine(_Line):
    """A document's content; under `ConversationLayout`, the message as JSON."""

    kind: Literal["document"] = "document"
    hash: str
    tokens: int
    text: str | None = None
    token_ids: tuple[int, ...] | None = None


class Entry(_Line):
    """A document in a window: its id (or the hash of that), and the hash of its content."""

    id: str
    hash: str
    pinned: bool = False


class WindowLine(_Line):
    """A change of the window, or, as a `snapshot`, all that it holds.

    Args:
        change: as in `rolling_kv.hooks.WindowChanged`, or `snapshot`.
        removed: ids that go first.
        inserted: what comes then, with its place in the window that results, ascending.
        digest: of the window that results.
    """

    kind: Literal["window"] = "window"
    at: float
    change: Literal["append", "evict", "replace", "pin", "unpin", "show", "snapshot"]
    removed: tuple[str, ...] = ()
    inserted: tuple[tuple[int, Entry], ...] = ()
    digest: str


class UsageLine(_Line):
    """Fields of `Usage`."""

    prompt_tokens: int
    prefix: int
    reused: int
    recomputed: int
    computed: int
    output: int
    ingested: int
    degraded: tuple[str, ...]


class TimingLine(_Line):
    """Fields of `Timing`."""

    ingest: float
    load: float
    select: float
    fuse: float
    first_token: float
    ttft: float
    total: float


class SelectionLine(_Line):
    """Fields of `SelectionStats`, and the positions as runs, [from, to)."""

    policy: str
    k: int
    reusable: int
    segments: int
    captured_deviation: float | None
    recall: float | None
    deviation_sample: float | None
    runs: tuple[tuple[int, int], ...]


class RequestLine(_Line):
    """A request and its answer, when that is there.

    Args:
        number: of the session's calls.
        query: a text, or a message; its hash in a trace without texts, as with answer and texts in `options`.
        options: of `ask`; `guide` only says that there was one.
        window: the window it was asked over, where that is not the one the lines before have come to.
        prompt_digest: xxh3-128 (hex) of the prompt's token ids.
        window_digest: of the window.
    """

    kind: Literal["request"] = "request"
    at: float
    number: int
    query: JsonValue
    options: dict[str, JsonValue]
    window: tuple[Entry, ...] | None = None
    window_digest: str
    prompt_digest: str
    lineages: tuple[str, ...]
    selection: SelectionLine
    usage: UsageLine
    timing: TimingLine
    prerolled: int
    logits_fingerprint: str
    finish_reason: Literal["eos", "stop", "length"]
    answer: str
    answer_ids: tuple[int, ...] | None
    answer_digest: str
    margins: tuple[float, ...]


Line = Header | DocumentLine | WindowLine | RequestLine
LINES: dict[str, type[Line]] = {
    "header": Header,
    "document": DocumentLine,
    "window": WindowLine,
    "request": RequestLine,
}


def encoded(line: Line, *, after: str) -> tuple[bytes, str]:
    """A line as it is written, and its sum, when `after` is the sum of the line before it."""
    values = line.model_dump(mode="json")
    try:
        body = json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # a lone surrogate, in an id for example
        body = json.dumps(values, separators=(",", ":")).encode()
    digest = sum_of(body[:-1], after="" if isinstance(line, Header) else after)
    return body[:-1] + f',"sum":"{digest}"}}\n'.encode(), digest


def parted(line: bytes) -> tuple[bytes, str] | None:
    """A line without its sum and closing brace, and the sum; None when it is no line of a trace."""
    found = _SUMMED.fullmatch(line)
    return None if found is None else (found[1], found[2].decode())


def sum_of(body: bytes, *, after: str) -> str:
    """The sum of a line without `sum`, its closing brace left out."""
    return xxhash.xxh3_64_hexdigest(after.encode() + body)


def entries_digest(entries: Sequence[Entry]) -> str:
    """xxh3-128 (hex) of what a window holds, in order."""
    listed = [[entry.id, entry.hash, entry.pinned] for entry in entries]
    return xxhash.xxh3_128_hexdigest(json.dumps(listed).encode())


def tokens_digest(token_ids: Sequence[int]) -> str:
    """xxh3-128 (hex) of token ids, as of a prompt or an answer."""
    return xxhash.xxh3_128_hexdigest(np.asarray(token_ids, dtype="<u4").tobytes())


def text_hash(text: str) -> str:
    """xxh3-128 (hex) of a text that is not recorded."""
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8", errors="surrogatepass"))


def entry_of(document: Document, *, text: bool) -> Entry:
    """A document of a window as an entry; without texts its id is hashed as well."""
    name = document.id if text else text_hash(document.id)
    return Entry(id=name, hash=document.content_hash, pinned=document.pinned)
