"""A labelled request refuses labels that cannot be right."""

from __future__ import annotations

from typing import Any

import pytest

from rolling_kv.errors import ConfigError, EmptyDocumentError, WindowError
from rolling_kv.workloads.request import LabelledRequest, TextSpan, holds_whole


def made(**changes: Any) -> LabelledRequest:
    fields: dict[str, Any] = {
        "documents": ("The door is red.", "The roof is green."),
        "query": "Which colour is the roof?",
        "answer_prefix": " The roof is",
        "expected": "green",
        "spans": (TextSpan(1, 12, 17),),
    }
    return LabelledRequest(**fields | changes)


def test_a_span_is_read_from_its_document() -> None:
    request = made()
    assert request.text(request.spans[0]) == "green"
    assert request.instruction == ""


@pytest.mark.parametrize(
    "span",
    [TextSpan(1, 12, 19), TextSpan(1, -1, 3), TextSpan(0, 4, 4), TextSpan(0, 5, 4), TextSpan(0, 16, 17)],
)
def test_a_span_outside_its_document_is_refused(span: TextSpan) -> None:
    with pytest.raises(ConfigError, match=r"does not lie inside its document of 1[68] characters"):
        made(spans=(span,))


@pytest.mark.parametrize("document", [-1, 2])
def test_a_span_in_no_document_is_refused(document: int) -> None:
    with pytest.raises(ConfigError, match="in no document; expected a document from 0 to 1"):
        made(spans=(TextSpan(document, 0, 1),))


def test_documents_have_text_without_white_space_around_it() -> None:
    with pytest.raises(WindowError, match="no documents"):
        made(documents=())
    with pytest.raises(EmptyDocumentError, match=r"documents\[1\]: .*empty"):
        made(documents=("red", " \n"))
    with pytest.raises(WindowError, match=r"documents\[0\] has white space around"):
        made(documents=(" The door is red.", "The roof is green."))


def test_a_query_asks_something() -> None:
    with pytest.raises(ConfigError, match="query is empty"):
        made(query=" ")


def test_a_right_answer_is_whole() -> None:
    assert made().is_right(" green, and old")
    assert not made().is_right("greenish")
    with pytest.raises(ConfigError, match="no expected answer"):
        made(expected="").is_right("anything")


@pytest.mark.parametrize("answer", ["17.12", "7.125", "7.12,5", "a7.12", "1,7.12", "712", ""])
def test_a_number_within_another_is_not_whole(answer: str) -> None:
    assert holds_whole("It was 7.12.", "7.12")
    assert not holds_whole(answer, "7.12")
