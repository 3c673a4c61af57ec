"""Documents: the user's text, tracked by the hash of its content."""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

from rolling_kv.errors import EmptyDocumentError, RollingKVError, WindowError

_HASH_VERSION = b"rolling_kv.document.v1"


def content_hash(text: str) -> str:
    """xxh3-128 (hex) of a versioned, length-delimited encoding of `text`."""
    data = text.encode("utf-8", errors="surrogatepass")
    return xxhash.xxh3_128_hexdigest(_HASH_VERSION + len(data).to_bytes(8, "little") + data)


@dataclass(frozen=True, slots=True)
class Document:
    """One document of the window.

    `id` names it within the window and never reaches the prompt; equal texts share `content_hash`. `stream`
    holds the token ids of the documents that came before it, oldest first, where its KV is to see them.
    """

    id: str
    text: str
    token_ids: tuple[int, ...]
    content_hash: str
    pinned: bool = False
    stream: tuple[tuple[int, ...], ...] = ()

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


def require_text(text: str) -> str:
    """`text` without surrounding white space, which no prompt keeps.

    Raises:
        EmptyDocumentError: nothing is left.
        WindowError: it holds half of a surrogate pair, which no tokenizer takes.
        TypeError: it is not a string.
    """
    if not isinstance(text, str):
        raise TypeError(f"A document is text (str), not {type(text).__name__}; decode or render it first.")
    stripped = text.strip()
    if not stripped:
        raise EmptyDocumentError(
            "The document is empty or only white space; a document needs some text. Skip it instead of "
            "appending it."
        )
    require_characters(stripped, what="document", error=WindowError)
    return stripped


def require_characters(text: str, *, what: str, error: type[RollingKVError]) -> None:
    """Checks that `text`, the prompt's `what`, holds no half of a surrogate pair.

    Raises:
        RollingKVError: it does; of the type `error`.
    """
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise error(
            f"The {what} holds a lone surrogate, which is no character. Read it again in its own encoding, "
            "or with errors='replace'."
        )
