"""Every policy against a slow, literal float64 reading of its equation (Gu et al., 2026, section 2)."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolling_kv.errors import UnknownPolicyError
from rolling_kv.policies import POLICIES, create_policy
from rolling_kv.policies.base import SelectionInput, Span, budget
from rolling_kv.policies.fixed_chunk import FixedChunk
from rolling_kv.policies.random_document import RandomDocument


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


EVERY_NEED = {need for name in POLICIES for need in POLICIES.create(name).needs}


def given_input(deviation: list[float], spans: list[tuple[int, int]], k: int) -> SelectionInput:
    scores = dict.fromkeys(EVERY_NEED, torch.tensor(deviation))
    return SelectionInput(k=k, spans=[Span(*span) for span in spans], scores=scores)


def literal_single_window(deviation: list[float], k: int) -> list[int]:
    """The window of k tokens with the largest total, the earliest of equal ones."""
    totals = [sum(Fraction(d) for d in deviation[at : at + k]) for at in range(len(deviation) - k + 1)]
    first = totals.index(max(totals))
    return list(range(first, first + k))


def literal_fixed_chunk(deviation: list[float], k: int, *, length: int) -> list[int]:
    """Chunks of `length` after half a chunk, so that they cross documents; ranked and filled like
    documents."""
    chunks, start = [], 0
    while start < len(deviation):
        stop = min(len(deviation), start + (length // 2 if start == 0 else length))
        chunks.append((start, stop))
        start = stop
    return literal_document_aligned(deviation, chunks, k)


def literal_epic(spans: list[tuple[int, int]], k: int) -> list[int]:
    """One token of every document in turn, from its beginning, until k are taken."""
    chosen: list[int] = []
    depth = 0
    while len(chosen) < k:
        for start, stop in spans:
            if start + depth < stop and len(chosen) < k:
                chosen.append(start + depth)
        depth += 1
    return sorted(chosen)


TOP_K = ("token-topk", "token-topk-gradual", "fusionrag", "prophetkv", "qcfuse")
BY_DOCUMENT = ("document-aligned", "qcfuse-spans")


@pytest.mark.parametrize("name", TOP_K)
@settings(max_examples=100, deadline=None)
@given(case=selections())
def test_the_largest_scores(name: str, case: tuple[list[float], list[tuple[int, int]], int]) -> None:
    chosen = POLICIES.create(name).select(given_input(*case))
    assert chosen.tolist() == literal_token_topk(case[0], case[2])


@pytest.mark.parametrize("name", BY_DOCUMENT)
@settings(max_examples=200, deadline=None)
@given(case=selections())
def test_whole_documents_by_their_mean(
    name: str, case: tuple[list[float], list[tuple[int, int]], int]
) -> None:
    chosen = POLICIES.create(name).select(given_input(*case))
    assert chosen.tolist() == literal_document_aligned(*case)


@settings(max_examples=200, deadline=None)
@given(case=selections(), length=st.integers(2, 12))
def test_windows_chunks_and_beginnings(
    case: tuple[list[float], list[tuple[int, int]], int], length: int
) -> None:
    deviation, spans, k = case
    given = given_input(*case)
    assert POLICIES.create("single-window").select(given).tolist() == literal_single_window(deviation, k)
    chunked = FixedChunk(length=length).select(given).tolist()
    assert chunked == literal_fixed_chunk(deviation, k, length=length)
    assert POLICIES.create("epic").select(given).tolist() == literal_epic(spans, k)


@settings(max_examples=100, deadline=None)
@given(case=selections(), seed=st.integers(0, 5))
def test_random_documents_are_whole_and_the_same_for_a_seed(
    case: tuple[list[float], list[tuple[int, int]], int], seed: int
) -> None:
    given = SelectionInput(k=case[2], spans=[Span(*span) for span in case[1]])
    chosen = RandomDocument(seed=seed).select(given).tolist()
    assert chosen == RandomDocument(seed=seed).select(given).tolist()
    assert len(set(chosen)) == case[2]
    cut = [span for span in case[1] if 0 < len(set(range(*span)) & set(chosen)) < span[1] - span[0]]
    assert len(cut) <= 1, "at most one document is taken in part"
    for start, stop in cut:
        inside = [index for index in chosen if start <= index < stop]
        assert inside == list(range(start, start + len(inside))), "and then its beginning"


def test_random_documents_differ_between_seeds() -> None:
    spans = [Span(10 * n, 10 * n + 10) for n in range(12)]
    given = SelectionInput(k=30, spans=spans)
    assert len({tuple(RandomDocument(seed=seed).select(given).tolist()) for seed in range(6)}) > 3


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


@pytest.mark.parametrize("name", ["token-topk", "document-aligned", "single-window", "fixed-chunk", "epic"])
def test_equal_scores_go_to_the_earliest(name: str) -> None:
    """0.1 has no exact float: running totals of equal windows must still come out equal."""
    spans = [(0, 7), (7, 14), (14, 30)]
    for k in (1, 3, 7, 9, 29):
        first = literal_epic(spans, k) if name == "epic" else list(range(k))
        assert POLICIES.create(name).select(given_input([0.1] * 30, spans, k)).tolist() == first


def test_one_huge_deviation_does_not_hide_the_ones_after_it() -> None:
    deviation = [3e15, 0.0, 0.0, 0.25, 0.5, 0.25, 0.0, 0.0]
    chosen = POLICIES.create("document-aligned").select(given_input(deviation, [(0, 1), (1, 8)], 3))
    assert chosen.tolist() == [0, 3, 4]


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


@pytest.mark.parametrize(
    ("tokens", "ratio", "k"), [(30, 0.1, 3), (10, 0.3, 3), (100, 0.29, 28), (100, 0.57, 56), (3, 1 / 3, 1)]
)
def test_budget_floors_the_product_of_floats(tokens: int, ratio: float, k: int) -> None:
    """As LMCache does, so that budgets can be compared: 0.29 * 100 is 28.99..., one less than on paper."""
    assert budget(tokens, ratio) == k


@given(st.integers(0, 10_000), st.floats(0.0, 1.0))
def test_budget_is_the_equation(tokens: int, ratio: float) -> None:
    expected = 0 if ratio == 0 or tokens == 0 else max(1, math.floor(ratio * tokens))
    assert budget(tokens, ratio) == expected <= max(tokens, 0)


def test_the_registry_makes_what_it_names() -> None:
    assert len(list(POLICIES)) == 14
    for name in POLICIES:
        assert POLICIES.create(name).name.partition(":")[0] == name
        assert POLICIES.create(name) is not POLICIES.create(name)
    with pytest.raises(
        UnknownPolicyError, match=r"'magic'.*Known ones: direct-reuse, document-aligned, epic"
    ):
        POLICIES.create("magic")


@pytest.mark.parametrize(
    "name", ["sink-repair:sink-repair", "sink-repair:direct-reuse", "epic:epic", "x:epic"]
)
def test_only_policies_that_spend_a_budget_can_be_wrapped(name: str) -> None:
    with pytest.raises(UnknownPolicyError):
        create_policy(name)


WRAPPED = sorted(set(POLICIES) - {"direct-reuse", "full-prefill", "sink-repair"})


@pytest.mark.parametrize("name", WRAPPED)
@settings(max_examples=60, deadline=None)
@given(case=selections(), data=st.data())
def test_sinks_first_and_the_rest_as_if_they_were_not_there(
    name: str, case: tuple[list[float], list[tuple[int, int]], int], data: st.DataObject
) -> None:
    """A fifth of k goes to the sinks that deviate most; the wrapped policy sees a prompt without them."""
    deviation, spans, k = case
    known = data.draw(st.lists(st.booleans(), min_size=len(deviation), max_size=len(deviation)))
    sinks = [d if is_sink else -math.inf for d, is_sink in zip(deviation, known, strict=True)]
    policy = create_policy(f"sink-repair:{name}")
    assert policy.name == f"sink-repair:{name}"
    scores = {
        need: torch.tensor(sinks if need.signal == "sink-deviation" else deviation) for need in policy.needs
    }
    chosen = policy.select(SelectionInput(k=k, spans=[Span(*span) for span in spans], scores=scores)).tolist()
    count = min(-(-k // 5), sum(known))
    repaired = [i for i in literal_token_topk(sinks, count)]
    others = [index for index in range(len(deviation)) if index not in repaired]
    rest: list[int] = []
    if count < k:
        left = [(others.index(span[0]), others.index(span[-1]) + 1) for span in whole(spans, others)]
        inner = create_policy(name).select(given_input([deviation[i] for i in others], left, k - count))
        rest = [others[index] for index in inner.tolist()]
    assert chosen == sorted(repaired + rest)


def whole(spans: list[tuple[int, int]], kept: list[int]) -> list[list[int]]:
    """The kept tokens of each span that has some."""
    inside = [[index for index in kept if start <= index < stop] for start, stop in spans]
    return [span for span in inside if span]


def test_every_policy_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")
    assert [name for name in POLICIES if f"| `{name}` |" not in page] == []
