"""The window: the ordered documents now in the prompt, bounded by count, by tokens, or by both.

A `Window` is a value. Every change returns a new one, so that a change whose KV cannot be computed or
stored can be dropped without a trace.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rolling_kv.errors import (
    ConfigError,
    DocumentTooLongError,
    DuplicateDocumentError,
    UnknownDocumentError,
    WindowFullError,
)
from rolling_kv.window.document import Document


def parse_eviction(rule: str) -> int:
    """How many documents are evicted at once: 1 for `oldest`, b for `batch:b`.

    Raises:
        ConfigError: there is no such rule.
    """
    if rule == "oldest":
        return 1
    batch = re.fullmatch(r"batch:([1-9][0-9]{0,5})", rule)
    if batch is None:
        raise ConfigError(
            f"Unknown eviction {rule!r}. Known ones: oldest, batch:b (b documents, as batch:8)."
        )
    return int(batch[1])


@dataclass(frozen=True, slots=True)
class Window:
    """Ordered documents, oldest first.

    Args:
        documents: what it holds; the same text may stand twice under two ids.
        max_documents: at most so many documents (None: no bound).
        max_tokens: at most so many document tokens (None: no bound).
        batch: so many documents are evicted at once, after the window has grown by as many but one; the bound
            on tokens is never passed.
    """

    documents: tuple[Document, ...] = ()
    max_documents: int | None = None
    max_tokens: int | None = None
    batch: int = 1

    def __post_init__(self) -> None:
        for name, bound in (("window", self.max_documents), ("window_tokens", self.max_tokens)):
            if bound is not None and bound < 1:
                raise ConfigError(f"{name} is {bound}; expected at least 1, or None for no bound.")

    def __len__(self) -> int:
        return len(self.documents)

    def __iter__(self) -> Iterator[Document]:
        return iter(self.documents)

    @property
    def tokens(self) -> int:
        return sum(document.tokens for document in self.documents)

    def index_of(self, document_id: str) -> int:
        for index, document in enumerate(self.documents):
            if document.id == document_id:
                return index
        known = ", ".join(document.id for document in self.documents[:5]) or "none"
        more = " ..." if len(self) > 5 else ""
        raise UnknownDocumentError(
            f"No document {document_id!r} is in the window of {len(self)}. Ids in it: {known}{more}"
        )

    def unused_id(self, content_hash: str) -> str:
        """An id from the content, numbered when the same text stands in the window already."""
        taken = {document.id for document in self.documents}
        base = candidate = content_hash[:12]
        count = 1
        while candidate in taken:
            count += 1
            candidate = f"{base}-{count}"
        return candidate

    def append(self, document: Document) -> tuple[Window, tuple[Document, ...]]:
        """Adds `document` at the end; evicts the oldest that are not pinned until the bounds hold.

        Returns:
            The new window, and the evicted documents, oldest first.

        Raises:
            DuplicateDocumentError: its id is in the window already.
            DocumentTooLongError: it alone exceeds `max_tokens`.
            WindowFullError: only pinned documents are left to evict.
        """
        if any(document.id == present.id for present in self.documents):
            raise DuplicateDocumentError(
                f"A document {document.id!r} is in the window already. "
                "Use replace() to change it, or append under another id."
            )
        self._require_fit(document)
        return self._with_room_for(document, [*self.documents, document])

    def evict(self, document_id: str) -> tuple[Window, Document]:
        """Without that document; also one that is pinned, since it is asked for by name."""
        index = self.index_of(document_id)
        rest = self.documents[:index] + self.documents[index + 1 :]
        return replace(self, documents=rest), self.documents[index]

    def replace(self, document_id: str, document: Document) -> tuple[Window, tuple[Document, ...]]:
        """Puts `document` where `document_id` stands; evicts the oldest others if it is too long to fit.

        Returns:
            The new window, and the documents evicted to make room (without the replaced one).
        """
        index = self.index_of(document_id)
        if document.id != document_id and any(document.id == present.id for present in self.documents):
            raise DuplicateDocumentError(
                f"A document {document.id!r} is in the window already; ids are unique."
            )
        self._require_fit(document)
        return self._with_room_for(
            document, [*self.documents[:index], document, *self.documents[index + 1 :]]
        )

    def hold(self, documents: Sequence[Document]) -> Window:
        """With exactly `documents`.

        Raises:
            DuplicateDocumentError, DocumentTooLongError: as for `append`.
            WindowFullError: they exceed the bounds.
        """
        seen: set[str] = set()
        for document in documents:
            self._require_fit(document)
            if document.id in seen:
                raise DuplicateDocumentError(
                    f"Two of the {len(documents)} documents have the id {document.id!r}; ids are unique."
                )
            seen.add(document.id)
        held = replace(self, documents=tuple(documents))
        if self._exceeds(list(documents)):
            raise WindowFullError(
                f"{len(documents)} documents of {held.tokens} tokens exceed the window's bounds "
                f"(window={self.max_documents}, window_tokens={self.max_tokens}). Show fewer of them, or "
                "open the session with a larger window."
            )
        return held

    def next_after_append(self) -> tuple[Document, ...]:
        """What is left when one more document comes; of average length, where tokens bound the window."""
        kept = list(self.documents)
        average = self.tokens // len(self) if len(self) else 0
        grown = self.max_documents is not None and len(kept) + 1 > self.max_documents + self.batch - 1
        evicted = 0
        while kept and (
            ((grown or evicted) and evicted < self.batch)
            or (self.max_tokens is not None and sum(d.tokens for d in kept) + average > self.max_tokens)
        ):
            oldest = next((i for i, document in enumerate(kept) if not document.pinned), None)
            if oldest is None:
                break
            kept.pop(oldest)
            evicted += 1
        return tuple(kept)

    def pin(self, document_id: str, *, pinned: bool = True) -> Window:
        """Marks a document so that appending never evicts it (or takes the mark away)."""
        index = self.index_of(document_id)
        marked = replace(self.documents[index], pinned=pinned)
        return replace(self, documents=(*self.documents[:index], marked, *self.documents[index + 1 :]))

    def check_integrity(self) -> list[str]:
        """What does not hold of this window (empty when all does): unique ids, and both bounds."""
        problems = []
        ids = [document.id for document in self.documents]
        if len(set(ids)) != len(ids):
            problems.append("two documents share an id")
        if self._exceeds(list(self.documents)):
            problems.append(f"{len(self)} documents and {self.tokens} tokens exceed the bounds")
        return problems

    def _with_room_for(self, document: Document, kept: list[Document]) -> tuple[Window, tuple[Document, ...]]:
        """A window of `kept` without the oldest that do not fit; `document` and pinned ones stay."""
        evicted: list[Document] = []
        while self._exceeds(kept) or 0 < len(evicted) < self.batch:
            oldest = next((i for i, d in enumerate(kept) if not d.pinned and d is not document), None)
            if oldest is None and not self._exceeds(kept):
                break
            if oldest is None:
                raise WindowFullError(
                    f"The window is full ({len(self)} documents, {self.tokens} tokens), {document.id!r} "
                    f"needs {document.tokens} tokens, and everything that could make room is pinned. "
                    "Unpin or evict a document, or open the session with a larger window."
                )
            evicted.append(kept.pop(oldest))
        return replace(self, documents=tuple(kept)), tuple(evicted)

    def _exceeds(self, documents: list[Document]) -> bool:
        if self.max_documents is not None and len(documents) > self.max_documents + self.batch - 1:
            return True
        return self.max_tokens is not None and sum(d.tokens for d in documents) > self.max_tokens

    def _require_fit(self, document: Document) -> None:
        if self.max_tokens is not None and document.tokens > self.max_tokens:
            raise DocumentTooLongError(
                f"The document has {document.tokens} tokens and the window is bounded by {self.max_tokens}. "
                "Split the document, or open the session with a larger window_tokens."
            )
