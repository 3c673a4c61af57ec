"""RULER-style requests, read back from their own text."""

from __future__ import annotations

import re
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolling_kv.errors import ConfigError
from rolling_kv.workloads.request import LabelledRequest
from rolling_kv.workloads.ruler import (
    multi_query_requests,
    multi_value_requests,
    variable_tracking_requests,
)

ASSIGNMENT = r"(?:Note \d+: )?(.+) = (.+?)\.?"
SEEDS = st.integers(0, 10**6)


def held_numbers(request: LabelledRequest) -> dict[str, list[str]]:
    """The numbers of every person, in the order of the notes."""
    held: dict[str, list[str]] = {}
    for text in request.documents:
        [(name, number)] = re.findall(r"The locker number of (.+) is (\d{3})\.$", text)
        held.setdefault(name, []).append(number)
    return held


def listed(answer: str) -> list[str]:
    return re.split(r", | and ", answer)


@settings(deadline=None)
@given(seed=SEEDS, keys=st.integers(2, 5), more=st.integers(0, 20))
def test_multi_query_asks_several_people(seed: int, keys: int, more: int) -> None:
    request = next(multi_query_requests(seed, documents=keys + more, keys=keys))
    held = held_numbers(request)
    assert len(held) == keys + more  # everybody has one number
    [who] = re.findall(r"locker numbers of (.+)\?", request.query)
    asked = listed(who)
    assert len(set(asked)) == keys
    assert [[number] for number in listed(request.expected)] == [held[name] for name in asked]
    facts = [f"{name} is {number}" for name, number in zip(asked, listed(request.expected), strict=True)]
    assert [request.text(span) for span in request.spans] == facts
    assert f" {who} " in request.answer_prefix


@settings(deadline=None)
@given(seed=SEEDS, values=st.integers(2, 5), more=st.integers(0, 20))
def test_multi_value_asks_all_numbers_of_one_person(seed: int, values: int, more: int) -> None:
    request = next(multi_value_requests(seed, documents=values + more, values=values))
    held = held_numbers(request)
    [name] = re.findall(r"locker numbers of (.+)\?", request.query)
    assert listed(request.expected) == held.pop(name)
    assert len(held) == more
    assert all(len(numbers) == 1 for numbers in held.values())
    facts = [f"{name} is {number}" for number in listed(request.expected)]
    assert [request.text(span) for span in request.spans] == facts
    assert len({span.document for span in request.spans}) == values


@settings(deadline=None)
@given(seed=SEEDS, links=st.integers(2, 5), more=st.integers(0, 20))
def test_variable_tracking_follows_a_chain(seed: int, links: int, more: int) -> None:
    request = next(variable_tracking_requests(seed, documents=links + more, links=links))
    value: dict[str, str] = {}
    for text in request.documents:  # in order: a variable is assigned before it is used
        [(name, given)] = re.findall(ASSIGNMENT + "$", text)
        assert name not in value
        value[name] = given if given.isdigit() else value[given]
    chain = [re.fullmatch(ASSIGNMENT, request.text(span)) for span in request.spans]
    pairs = [(match[1], match[2]) for match in chain if match]
    assert len(pairs) == links
    assert pairs[0][1] == request.expected
    assert [given for _, given in pairs[1:]] == [name for name, _ in pairs[:-1]]
    last = pairs[-1][0]
    assert value[last] == request.expected
    assert last in request.query
    assert last in request.answer_prefix
    assert [span.document for span in request.spans] == sorted({span.document for span in request.spans})


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (multi_query_requests, "keys"),
        (multi_value_requests, "values"),
        (variable_tracking_requests, "links"),
    ],
)
def test_what_cannot_be_made_is_refused(make, name: str) -> None:  # type: ignore[no-untyped-def]
    for count in (1, 6):
        with pytest.raises(ConfigError, match=f"{name} is {count}; expected 2 to 5"):
            make(0, documents=16, **{name: count})
    with pytest.raises(ConfigError, match="documents is 3; expected 4 to 900"):
        make(0, documents=3, **{name: 4})
    assert len(list(islice(make(0, documents=4, **{name: 4}), 3))) == 3
