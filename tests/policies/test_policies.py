"""Every policy against a slow, literal float64 reading of its equation (Gu et al., 2026, section 2)."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolling_kv.errors import UnknownPolicyError
from rolling_kv.policies import POLICIES
from rolling_kv.policies.base import SelectionInput, Span, budget


def literal_token_topk(deviation: list[float], k: int) -> list[int]:
    """The k largest d_i; of equal ones, the earlier."""
    chosen: list[int] = []
    for _ in range(k):
        best = None
        for index, value in enumerate(deviation):
            if index not in chosen and (best is None or value > deviation[best]):
                best = index
        assert best is not None
        chosen.append(best)
    return sorted(chosen)


def literal_document_aligned(deviation: list[float], spans: list[tuple[int, int]], k: int) -> list[int]:
    """Whole spans by mean d_i while they fit, then the window of largest total in the best span left.

    Exact rational arithmetic, so that ties are ties.
    """
    exact = [Fraction(value) for value in deviation]
    left = [span for span in spans if span[1] > span[0]]
    chosen: list[int] = []
    while len(chosen) < k:
        means = [sum(exact[a:b], Fraction()) / (b - a) for a, b in left]
        start, stop = left.pop(means.index(max(means)))
        remaining = k - len(chosen)
        if stop - start <= remaining:
            chosen += range(start, stop)
            continue
        totals = [sum(exact[at : at + remaining], Fraction()) for at in range(start, stop - remaining + 1)]
        first = start + totals.index(max(totals))
        chosen += range(first, first + remaining)
    return sorted(chosen)


@st.composite
def selections(draw: st.DrawFn) -> tuple[list[float], list[tuple[int, int]], int]:
    """Deviations with many ties (small integers are exact in every float type), spans that cover them, 0 < k
    < N."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=7).filter(lambda ls: sum(ls) > 1))
    tokens = sum(lengths)
    deviation = draw(st.lists(st.integers(0, 4).map(float), min_size=tokens, max_size=tokens))
    spans, start = [], 0
    for length in lengths:
        spans.append((start, start + length))
        start += length
    return deviation, spans, draw(st.integers(1, tokens - 1))


def given_input(deviation: list[float], spans: list[tuple[int, int]], k: int) -> SelectionInput:
    return SelectionInput(k=k, spans=[Span(*span) for span in spans], deviation=torch.tensor(deviation))


@settings(max_examples=300, deadline=None)
@given(selections())
def test_token_topk_is_its_equation(case: tuple[list[float], list[tuple[int, int]], int]) -> None:
    chosen = POLICIES.create("token-topk").select(given_input(*case))
    assert chosen.tolist() == literal_token_topk(case[0], case[2])


@settings(max_examples=300, deadline=None)
@given(selections())
def test_document_aligned_is_its_equation(case: tuple[list[float], list[tuple[int, int]], int]) -> None:
    chosen = POLICIES.create("document-aligned").select(given_input(*case))
    assert chosen.tolist() == literal_document_aligned(*case)


@pytest.mark.parametrize("name", ["token-topk", "document-aligned"])
@pytest.mark.parametrize("seed", range(5))
def test_large_random_inputs(name: str, seed: int) -> None:
    source = random.Random(seed)
    spans, start = [], 0
    for _ in range(84):
        length = source.randrange(1, 120)
        spans.append((start, start + length))
        start += length
    deviation = torch.tensor(
        [source.lognormvariate(0, 3) for _ in range(start)], dtype=torch.float32
    ).tolist()
    for k in (1, budget(start, 0.05), start - 1):
        chosen = POLICIES.create(name).select(given_input(deviation, spans, k))
        again = POLICIES.create(name).select(given_input(deviation, spans, k))
        assert torch.equal(chosen, again)
        assert chosen.dtype == torch.int64
        assert len(set(chosen.tolist())) == k
        assert chosen.tolist() == sorted(chosen.tolist())
        assert int(chosen[0]) >= 0
        assert int(chosen[-1]) < start
        if name == "document-aligned" and k != 1:
            assert chosen.tolist() == literal_document_aligned(deviation, spans, k)
        if name == "token-topk":
            floor = min(deviation[index] for index in chosen.tolist())
            left = set(range(start)) - set(chosen.tolist())
            assert all(deviation[index] <= floor for index in left)


def test_document_aligned_takes_a_window_in_the_best_span_when_none_fits() -> None:
    given = given_input([1, 1, 1, 1, 0, 9, 9, 0], [(0, 4), (4, 8)], 2)
    assert POLICIES.create("document-aligned").select(given).tolist() == [5, 6]


def test_direct_reuse_and_full_prefill_select_nothing_and_everything() -> None:
    given = given_input([1.0, 2.0, 3.0], [(0, 3)], 1)
    direct, full = POLICIES.create("direct-reuse"), POLICIES.create("full-prefill")
    assert direct.select(given).tolist() == []
    assert not direct.recomputes
    assert full.select(given).tolist() == [0, 1, 2]
    assert not full.reuses


@pytest.mark.parametrize(
    ("tokens", "ratio", "k"),
    [(100, 0.0, 0), (0, 0.5, 0), (100, 0.001, 1), (7, 0.5, 3), (7, 1.0, 7), (1, 0.3, 1), (7_540, 0.05, 377)],
)
def test_budget(tokens: int, ratio: float, k: int) -> None:
    assert budget(tokens, ratio) == k


@given(st.integers(0, 10_000), st.floats(0.0, 1.0))
def test_budget_is_the_equation(tokens: int, ratio: float) -> None:
    expected = 0 if ratio == 0 or tokens == 0 else max(1, math.floor(ratio * tokens))
    assert budget(tokens, ratio) == expected <= max(tokens, 0)


def test_the_registry_makes_what_it_names() -> None:
    assert list(POLICIES) == ["direct-reuse", "document-aligned", "full-prefill", "token-topk"]
    for name in POLICIES:
        assert POLICIES.create(name).name == name
        assert POLICIES.create(name) is not POLICIES.create(name)
    with pytest.raises(UnknownPolicyError, match=r"'magic'.*Known ones: direct-reuse, document-aligned"):
        POLICIES.create("magic")
