"""A window, and the stream that its documents came in.

Like a `Window` it is a value: a change that cannot be carried out is dropped without a trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace as replaced

from rolling_kv.window.conditioning import Conditioning
from rolling_kv.window.document import Document
from rolling_kv.window.window import Window


@dataclass(frozen=True, slots=True)
class StreamedWindow:
    """A window whose documents know what came before them, where conditioning asks for that.

    Args:
        stream: token ids of the newest documents, evicted ones included, as far as they matter.
    """

    window: Window
    conditioning: Conditioning
    stream: tuple[tuple[int, ...], ...] = ()

    @property
    def documents(self) -> tuple[Document, ...]:
        return self.window.documents

    def append(self, document: Document) -> tuple[StreamedWindow, tuple[Document, ...]]:
        """With `document` at the end, and without those returned, which it drives out."""
        entering, stream = self._entering(document)
        window, evicted = self.window.append(entering)
        return replaced(self, window=window, stream=stream), evicted

    def replace(self, document: Document) -> tuple[StreamedWindow, tuple[Document, ...]]:
        """With `document` in the place of the one of its id, and without those it drives out."""
        entering, stream = self._entering(document)
        window, evicted = self.window.replace(document.id, entering)
        return replaced(self, window=window, stream=stream), evicted

    def evict(self, document_id: str) -> tuple[StreamedWindow, Document]:
        window, document = self.window.evict(document_id)
        return replaced(self, window=window), document

    def pin(self, document_id: str, *, pinned: bool) -> StreamedWindow:
        return replaced(self, window=self.window.pin(document_id, pinned=pinned))

    def hold(self, documents: Sequence[Document]) -> StreamedWindow:
        """With exactly `documents`; those that are there already, under the same id, stay as they are."""
        present = {(one.id, one.content_hash): one for one in self.documents}
        held, current = [], self
        for document in documents:
            stayed = present.get((document.id, document.content_hash))
            if stayed is None:
                document, stream = current._entering(document)
                current = replaced(current, stream=stream)
            held.append(stayed or document)
        return replaced(current, window=self.window.hold(held))

    def next_with_append(self) -> tuple[Document, ...]:
        """What is left when one more document comes, and a token in the place of that one."""
        coming, _ = self._entering(Document("", "", token_ids=(0,), content_hash=""))
        return (*self.window.next_after_append(), coming)

    def _entering(self, document: Document) -> tuple[Document, tuple[tuple[int, ...], ...]]:
        """The document with what came before it, and the stream with the document, as far as it matters."""
        neighbours = self.conditioning.neighbours
        if not self.conditioning.stream or neighbours is None:
            return document, self.stream
        return replaced(document, stream=self.stream), (*self.stream, document.token_ids)[-neighbours:]
