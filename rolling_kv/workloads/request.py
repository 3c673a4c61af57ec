"""A labelled request: documents, a query over them, and where in them the answer stands.

The labels show whether a policy's selection finds the evidence (QCFuse, section 3.2.3: Recall@10% over the
tokens of labelled answer spans).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rolling_kv.errors import ConfigError, WindowError
from rolling_kv.window import require_text


@dataclass(frozen=True, slots=True)
class TextSpan:
    """Characters `start` to `stop` (exclusive) of the text of document `document` (from 0)."""

    document: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class LabelledRequest:
    """A request whose right answer is known, and where in its documents it stands.

    Args:
        documents: oldest first, without surrounding white space, which no prompt keeps.
        query: stands after the documents.
        answer_prefix: starts the assistant's turn; the right answer goes on with `expected`.
        expected: the right answer; empty when it is not known.
        spans: the evidence, at least one character each.
        instruction: stands before the documents.

    Raises:
        WindowError: there is no document, or one without text or with white space around it.
        ConfigError: the query is blank, or a span does not lie inside its document.
    """

    documents: tuple[str, ...]
    query: str
    answer_prefix: str
    expected: str
    spans: tuple[TextSpan, ...]
    instruction: str = ""

    def __post_init__(self) -> None:
        if not self.documents:
            raise WindowError("The request has no documents; expected at least one.")
        for index, text in enumerate(self.documents):
            _require_document(text, index)
        if not self.query.strip():
            raise ConfigError("The query is empty; ask something about the documents.")
        for span in self.spans:
            self._require_inside(span)

    def _require_inside(self, span: TextSpan) -> None:
        count = len(self.documents)
        if not 0 <= span.document < count:
            raise ConfigError(f"{span} is in no document; expected a document from 0 to {count - 1}.")
        length = len(self.documents[span.document])
        if not 0 <= span.start < span.stop <= length:
            raise ConfigError(
                f"{span} does not lie inside its document of {length} characters; expected "
                f"0 <= start < stop <= {length}, counted without the white space around the text."
            )

    def text(self, span: TextSpan) -> str:
        """The characters that `span` covers."""
        return self.documents[span.document][span.start : span.stop]

    def is_right(self, answer: str) -> bool:
        """Whether `answer` holds `expected` whole; see `holds_whole`.

        Raises:
            ConfigError: `expected` is empty.
        """
        if not self.expected:
            raise ConfigError("The request has no expected answer, so none can be right; give it `expected`.")
        return holds_whole(answer, self.expected)


def _require_document(text: str, index: int) -> None:
    try:
        stripped = require_text(text)
    except WindowError as error:
        raise type(error)(f"documents[{index}]: {error}") from error
    if stripped != text:
        raise WindowError(
            f"documents[{index}] has white space around its text, which no prompt keeps; strip it, and move "
            "its spans by what went from the beginning."
        )


def holds_whole(answer: str, expected: str) -> bool:
    """Whether `answer` holds `expected` whole: "7.12" is neither in "17.12" nor in "7.125"."""
    return re.search(rf"(?<![\w.])(?<!\d,){re.escape(expected)}(?!\w|[.,]\d)", answer) is not None


def require_questions(questions: int) -> None:
    """ConfigError unless there is at least one question."""
    if questions < 1:
        raise ConfigError(f"questions is {questions}; expected at least 1.")
