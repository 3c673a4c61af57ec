"""The market stream is the same for a seed, and every question has one right answer."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import groupby, islice
from typing import Any

import pytest

from rolling_kv.errors import ConfigError
from rolling_kv.workloads.market import (
    MarketEvent,
    QuestionKind,
    copy_question,
    market_events,
    market_question,
    market_requests,
)


def taken(seed: int, count: int, **options: str) -> list[MarketEvent]:
    return list(islice(market_events(seed, **options), count))  # type: ignore[arg-type]


def test_a_seed_gives_one_stream_however_much_of_it_is_taken() -> None:
    assert taken(1, 300)[:40] == taken(1, 40)
    assert taken(1, 40) != taken(2, 40)
    assert [e.id for e in taken(1, 100)] == [e.id for e in taken(1, 100, detail="long")]


def test_ids_are_unique_and_each_channel_is_in_order() -> None:
    events = taken(3, 1500)
    assert len({event.id for event in events}) == 1500
    by_channel = defaultdict(list)
    for event in events:
        by_channel[event.kind, event.ticker].append(event.date)
    assert {kind for kind, _ in by_channel} == {"price", "news", "filing"}
    assert len({ticker for _, ticker in by_channel}) == 15
    assert all(dates == sorted(dates) for dates in by_channel.values())
    assert all(event.date.weekday() < 5 for event in events)


@pytest.mark.parametrize("detail", ["short", "long"])
@pytest.mark.parametrize("ask", [market_question, copy_question])
def test_every_question_has_one_right_answer(detail: str, ask) -> None:  # type: ignore[no-untyped-def]
    events = taken(4, 200, detail=detail)
    for step in range(150):
        window = events[step : step + 16]
        question = ask(window, seed=9, step=step)
        assert question == ask(window, seed=9, step=step)
        [source] = [event for event in window if event.id == question.event_id]
        assert window[question.span.document] is source
        assert question.expected == source.text[question.span.start : question.span.stop]
        assert question.is_right(f"It was {question.expected}.")
        same = [e for e in window if (e.kind, e.ticker, e.date) == (source.kind, source.ticker, source.date)]
        assert same == [source]


def test_equal_values_have_their_own_places() -> None:
    event = replace(
        taken(4, 1, detail="long")[0],
        text="prices in dollars: open 7.10, high 7.10, low 7.10, close 7.10",
        fields=(("open", "7.10"), ("high", "7.10"), ("low", "7.10"), ("close", "7.10")),
    )
    assert event.places() == {"open": (24, 28), "high": (35, 39), "low": (45, 49), "close": (57, 61)}


@pytest.mark.parametrize("detail", ["short", "long"])
def test_every_field_is_where_it_is_said_to_be(detail: str) -> None:
    for event in taken(5, 500, detail=detail):
        for name, (start, stop) in event.places().items():
            assert event.text[start:stop] == event.value(name)
            if detail == "long" and event.kind == "price":
                assert event.text[:start].endswith(f" {name} ")


@pytest.mark.parametrize(("question", "ask"), [("field", market_question), ("copy", copy_question)])
def test_requests_roll_by_one_event(question: str, ask) -> None:  # type: ignore[no-untyped-def]
    events = taken(6, 40, detail="long")
    requests = market_requests(6, documents=8, detail="long", question=question)  # type: ignore[arg-type]
    for step, request in enumerate(islice(requests, 33)):
        window = events[step : step + 8]
        assert request.documents == tuple(event.text for event in window)
        asked = ask(window, seed=6, step=step)
        assert (request.query, request.expected) == (asked.query, asked.expected)
        assert request.spans == (asked.span,)


@pytest.mark.parametrize("question", ["field", "copy"])
def test_several_questions_of_one_window_differ(question: QuestionKind) -> None:
    options: dict[str, Any] = {"documents": 24, "detail": "short", "question": question}
    one = list(islice(market_requests(6, **options), 5))
    several = groupby(
        islice(market_requests(6, questions=4, **options), 20), key=lambda request: request.documents
    )
    windows = [list(window) for _, window in several]
    assert [len(window) for window in windows] == [4] * 5
    for window, alone in zip(windows, one, strict=True):
        assert window[0] == alone
        assert len({request.query for request in window}) == 4


def test_a_window_with_few_questions_is_asked_few() -> None:
    requests = market_requests(6, documents=1, detail="short", question="copy", questions=3)
    first, second = islice(requests, 2)
    assert first.documents != second.documents


def test_requests_of_another_kind_are_refused() -> None:
    for changes in ({"question": "sum"}, {"detail": "tiny"}, {"documents": 0}, {"questions": 0}):
        [(name, value)] = changes.items()
        options = {"documents": 8, "detail": "short", "question": "field"} | changes
        with pytest.raises(ConfigError, match=f"{name} is {value!r}; expected"):
            market_requests(0, **options)  # type: ignore[arg-type]


def test_a_right_answer_is_whole() -> None:
    events = taken(4, 16)
    question = next(
        q for q in (market_question(events, seed=1, step=s) for s in range(50)) if q.expected[0].isdigit()
    )
    assert question.is_right(f"{question.expected} dollars")
    assert not question.is_right(f"1{question.expected} dollars")
    assert not question.is_right(f"{question.expected}1 dollars")
    assert not question.is_right("")


def test_long_records_have_the_size_of_the_papers() -> None:
    """About 90 tokens each with SmolLM2's tokenizer, measured; here the characters that this comes to."""
    events = taken(0, 400, detail="long")
    mean = sum(len(event.text) for event in events) / len(events)
    assert 140 < mean < 320, mean
