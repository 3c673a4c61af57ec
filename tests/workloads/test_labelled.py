"""What holds for every labelled workload."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolling_kv.errors import UnknownWorkloadError
from rolling_kv.workloads import LABELLED, LabelledRequest


def taken(name: str, seed: int, documents: int, count: int) -> list[LabelledRequest]:
    return list(islice(LABELLED.create(name)(seed, documents=documents), count))


def test_the_names_are_these() -> None:
    assert list(LABELLED) == [
        "market",
        "market-copy",
        "multi-query",
        "multi-value",
        "needle",
        "rolling-needle",
        "variable-tracking",
    ]
    with pytest.raises(
        UnknownWorkloadError, match=r"Unknown labelled workload 'haystack'\. Known ones: market,"
    ):
        LABELLED.create("haystack")


@pytest.mark.parametrize("name", sorted(LABELLED))
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10**6), documents=st.integers(5, 40))
def test_a_seed_gives_its_own_requests(name: str, seed: int, documents: int) -> None:
    requests = taken(name, seed, documents, 3)
    assert requests == taken(name, seed, documents, 5)[:3]
    assert requests != taken(name, seed + 1, documents, 3)
    assert all(len(request.documents) == documents for request in requests)


@pytest.mark.parametrize("name", sorted(LABELLED))
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10**6), documents=st.integers(5, 40))
def test_the_spans_are_what_is_expected(name: str, seed: int, documents: int) -> None:
    for request in taken(name, seed, documents, 3):
        labelled = [request.text(span) for span in request.spans]
        assert labelled
        if name == "variable-tracking":  # its first link holds the number
            assert labelled[0].endswith(request.expected)
        elif name in ("multi-query", "multi-value"):
            assert " and ".join(fact.rpartition(" is ")[2] for fact in labelled) == request.expected
        elif name in ("needle", "rolling-needle"):
            assert labelled[0].endswith(f" is {request.expected}")
        else:
            assert labelled == [request.expected]
        assert request.is_right(f" {request.expected}.")
        assert not request.is_right("")
