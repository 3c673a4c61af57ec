"""An agent's window: the documents that its messages brought in, newest last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from langchain_core.documents import Document
from langchain_core.messages import AnyMessage, BaseMessage, ToolMessage

from langchain_rolling_kv.messages import text_of
from rolling_kv.window import content_hash

_REFERENCE = 8  # characters of a hash by which messages refer to a document


def documents_of(messages: Sequence[BaseMessage], *, shortest: int) -> dict[str, str]:
    """The documents of a conversation by content hash, in the order in which they last arrived.

    A tool's result is a document, unless it is an error or shorter than `shortest` characters; when its
    artifact is a list of LangChain documents, as a retriever tool has it, each of those is one.
    """
    found: dict[str, str] = {}
    for message in messages:
        for key, text in _documents(message, shortest):
            found.pop(key, None)
            found[key] = text
    return found


def referring(messages: Sequence[AnyMessage], window: Sequence[str], *, shortest: int) -> list[AnyMessage]:
    """`messages` with references in the places of the documents that they brought in."""
    return [_referring(message, window, shortest) for message in messages]


def reference(key: str) -> str:
    """How messages refer to the document of a content hash."""
    return key[:_REFERENCE]


def _documents(message: BaseMessage, shortest: int) -> Iterator[tuple[str, str]]:
    if not isinstance(message, ToolMessage) or message.status == "error":
        return
    artifact = message.artifact
    if isinstance(artifact, list) and artifact and all(isinstance(one, Document) for one in artifact):
        texts = [one.page_content.strip() for one in artifact]
    else:
        texts = [text_of(message).strip()]
    for text in texts:
        if len(text) >= max(shortest, 1):
            yield content_hash(text), text


def _referring(message: AnyMessage, window: Sequence[str], shortest: int) -> AnyMessage:
    keys = [key for key, _ in _documents(message, shortest)]
    if not keys:
        return message
    lines = [
        f"See [{reference(key)}]." if key in window else f"[{reference(key)}] has left the window."
        for key in keys
    ]
    return message.model_copy(update={"content": "\n".join(lines)})
