"""Needle requests: the span is the asked key and number, which stand in one note alone, anywhere."""

from __future__ import annotations

import re
from collections import Counter
from itertools import groupby, islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolling_kv.errors import ConfigError
from rolling_kv.workloads.needle import needle_requests, rolling_needle_requests

NOTE = re.compile(
    r"Note \d+: (?P<name>.+) lives in \w+\. The locker number of (?P=name) is (?P<number>\d{3})\."
)


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), documents=st.integers(1, 60))
def test_only_the_labelled_note_answers(seed: int, documents: int) -> None:
    request = next(needle_requests(seed, documents=documents))
    read = [NOTE.fullmatch(text) for text in request.documents]
    held = {match["name"]: match["number"] for match in read if match}
    assert len(held) == documents  # no two notes share a name
    assert len(set(held.values())) == documents
    [span] = request.spans
    [name] = [name for name in held if f"number of {name}?" in request.query]
    assert held[name] == request.expected
    assert request.text(span) == f"{name} is {request.expected}"
    assert request.documents[span.document].split(": ")[1].startswith(f"{name} ")
    assert request.documents[span.document].endswith(f"{request.answer_prefix} {request.expected}.")


def test_the_needle_is_anywhere() -> None:
    """Uniformly: over 1600 requests chi-square of 16 places (15 degrees of freedom) exceeds 37.7 once in 1000
    seeds."""
    places = Counter(r.spans[0].document for r in islice(needle_requests(3, documents=16), 1600))
    assert set(places) == set(range(16))
    assert sum((count - 100) ** 2 / 100 for count in places.values()) < 37.7


def test_requests_are_fresh() -> None:
    first, second = islice(needle_requests(3, documents=16), 2)
    assert not set(first.documents) & set(second.documents)


def test_as_many_documents_as_there_are_numbers() -> None:
    request = next(needle_requests(5, documents=900))
    assert len({text.split(": ")[1].split(" lives")[0] for text in request.documents}) == 900
    for documents in (0, 901):
        with pytest.raises(ConfigError, match=f"documents is {documents}; expected 1 to 900"):
            needle_requests(5, documents=documents)


def test_no_note_of_a_window_is_asked_twice() -> None:
    for documents, asked in ((24, 6), (3, 3)):
        requests = islice(rolling_needle_requests(7, documents=documents, questions=6), 10 * asked)
        windows = [list(found) for _, found in groupby(requests, key=lambda request: request.documents)]
        assert [len({one.query for one in window}) for window in windows] == [asked] * 10
        for before, after in pairwise(windows):
            assert after[0].documents[:-1] == before[0].documents[1:]
    with pytest.raises(ConfigError, match="questions is 0"):
        rolling_needle_requests(7, documents=24, questions=0)


@pytest.mark.parametrize("documents", [1, 24, 100])
def test_a_rolling_window_loses_its_oldest_note_and_gains_one(documents: int) -> None:
    requests = list(islice(rolling_needle_requests(7, documents=documents), 200))
    for before, after in pairwise(requests):
        assert after.documents[:-1] == before.documents[1:]
    for request in requests:
        read = [NOTE.fullmatch(text) for text in request.documents]
        held = {match["name"]: match["number"] for match in read if match}
        assert len(held) == len(set(held.values())) == documents
        [span] = request.spans
        name = request.text(span).split(" is ")[0]
        assert f"number of {name}?" in request.query
        assert held[name] == request.expected
    assert len({request.spans[0].document for request in requests}) > min(documents, 20) / 2
