"""Changes of a window: what each makes of it, and what the caller is told when its KV is at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rolling_kv.answer import WindowChange
from rolling_kv.errors import ConfigError, WindowError
from rolling_kv.ingest import IngestReport
from rolling_kv.window import Document, Layout, StreamedWindow, Window

if TYPE_CHECKING:
    from rolling_kv.hooks import ChangeKind
    from rolling_kv.window.layout import Message


@dataclass(frozen=True, slots=True)
class Change:
    """A change that can be carried out.

    Args:
        held: the window that it leads to.
        told: what the caller is told, from what ingestion had to do; None when nothing is to be ingested.
    """

    kind: ChangeKind
    held: StreamedWindow
    told: Callable[[IngestReport], list[WindowChange]] | None = None


def append(
    held: StreamedWindow,
    layout: Layout,
    texts: Sequence[str | Message],
    *,
    ids: Sequence[str] | None,
    pinned: bool,
) -> Change:
    """All of `texts` at the end, in order. What ingestion does is told with the last."""
    added: list[tuple[str, tuple[Document, ...]]] = []
    for document in _documents(layout, texts, ids=ids, pinned=pinned):
        name = document.id or held.window.unused_id(document.content_hash)
        held, evicted = held.append(replace(document, id=name))
        added.append((name, evicted))

    def told(report: IngestReport) -> list[WindowChange]:
        last = len(added) - 1
        return [
            _told(name, evicted, report if index == last else IngestReport())
            for index, (name, evicted) in enumerate(added)
        ]

    return Change("append", held, told)


def show(
    held: StreamedWindow, layout: Layout, texts: Sequence[str | Message], *, ids: Sequence[str] | None
) -> Change:
    """Exactly `texts`; documents that are there already, under the same id, stay as they are."""
    named = Window()
    for document in _documents(layout, texts, ids=ids, pinned=False):
        named, _ = named.append(replace(document, id=document.id or named.unused_id(document.content_hash)))
    kept = {document.id for document in named}
    gone = [document for document in held.documents if document.id not in kept]
    last = named.documents[-1].id if len(named) else ""
    return Change("show", held.hold(named.documents), lambda report: [_told(last, gone, report)])


def evict(held: StreamedWindow, document_id: str) -> tuple[Change, Document]:
    """Without a document, pinned or not."""
    left, document = held.evict(document_id)
    return Change("evict", left, lambda report: [_told(document_id, [document], report)]), document


def put(held: StreamedWindow, layout: Layout, document_id: str, text: str | Message) -> Change:
    """`text` in the place of a document, under its id and pinned as it was."""
    old = held.documents[held.window.index_of(document_id)]
    left, evicted = held.replace(layout.document(text, document_id=document_id, pinned=old.pinned))
    return Change("replace", left, lambda report: [_told(document_id, evicted, report)])


def pin(held: StreamedWindow, document_id: str, *, pinned: bool) -> Change:
    """A document that is never evicted to make room, or is again."""
    return Change("pin" if pinned else "unpin", held.pin(document_id, pinned=pinned))


def require_forgettable(document: Document, left: StreamedWindow) -> None:
    """Checks that nothing of `document` lives on in the window `left`.

    Raises:
        WindowError
    """
    if left.conditioning.stream:
        raise WindowError(
            f"{document.id!r} cannot be forgotten under conditioning {left.conditioning.name!r}: its "
            "text lives on in the KV of the documents after it. Use window:k, or leave out forget=True."
        )
    twin = next((one.id for one in left.documents if one.token_ids == document.token_ids), None)
    if twin is not None:
        raise WindowError(
            f"{document.id!r} cannot be forgotten while {twin!r} with the same text is in the window. "
            "Evict that one first."
        )


def _documents(
    layout: Layout, texts: Sequence[str | Message], *, ids: Sequence[str] | None, pinned: bool
) -> list[Document]:
    """`texts` as documents, with the ids that were given."""
    if isinstance(texts, str):
        raise TypeError("A list of texts is expected, and this is one text; use append() for one.")
    if ids is not None and len(ids) != len(texts):
        raise ConfigError(f"{len(texts)} texts and {len(ids)} ids; expected one id a text.")
    names = [""] * len(texts) if ids is None else ids
    return [
        layout.document(text, document_id=name, pinned=pinned)
        for text, name in zip(texts, names, strict=True)
    ]


def _told(document_id: str, evicted: Sequence[Document], report: IngestReport) -> WindowChange:
    return WindowChange(
        document_id=document_id,
        evicted=tuple(one.id for one in evicted),
        computed=report.computed,
        degraded=tuple(report.degraded),
    )
