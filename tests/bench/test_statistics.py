"""Intervals and tests against scipy, against sums by hand, and against their own promise."""

from __future__ import annotations

from math import comb

import numpy as np
import pytest

from rolling_kv.bench.statistics import clustered_share_of, mcnemar, share_of


@pytest.mark.parametrize(("hits", "count"), [(0, 7), (1, 7), (3, 30), (29, 30), (30, 30)])
def test_clusters_of_one_outcome_come_near_the_plain_interval(hits: int, count: int) -> None:
    outcomes = [True] * hits + [False] * (count - hits)
    plain = share_of(outcomes)
    clustered = clustered_share_of([int(one) for one in outcomes], [1] * count)
    assert (clustered.hits, clustered.count, clustered.share) == (plain.hits, plain.count, plain.share)
    if hits in (0, count):
        assert (clustered.low, clustered.high) == pytest.approx((plain.low, plain.high), abs=1e-12)
    else:  # one degree of freedom goes to the share itself
        fewer = 1 / (count - 1)
        assert (clustered.low, clustered.high) == pytest.approx((plain.low, plain.high), abs=fewer / 2)
        assert clustered.low < plain.low < plain.high < clustered.high


def test_outcomes_of_one_cluster_count_less_than_independent_ones() -> None:
    hits, counts = [10] * 15 + [0] * 15, [10] * 30
    clustered = clustered_share_of(hits, counts)
    independent = share_of([True] * 150 + [False] * 150)
    requests = share_of([True] * 15 + [False] * 15)  # all pairs of a request agree, so it is one outcome
    assert clustered.high - clustered.low > 2.5 * (independent.high - independent.low)
    assert (clustered.low, clustered.high) == pytest.approx((requests.low, requests.high), abs=0.01)


def test_one_share_in_all_clusters_is_no_certainty() -> None:
    found = clustered_share_of([4] * 5, [10] * 5)
    assert found.low < 0.3
    assert found.high > 0.5


def test_one_cluster_is_one_outcome() -> None:
    assert clustered_share_of([0], [10]).high > 0.7
    assert clustered_share_of([6], [10]).high - clustered_share_of([6], [10]).low > 0.7


def test_the_interval_agrees_with_a_bootstrap_over_clusters_where_hits_are_many() -> None:
    from scipy.stats import bootstrap

    rng = np.random.default_rng(3)
    counts = rng.choice([6, 10], size=120)
    hits = rng.binomial(counts, rng.beta(1, 1, size=120))
    ours = clustered_share_of(hits.tolist(), counts.tolist())
    theirs = bootstrap(
        (hits, counts),
        lambda hit, count, axis: hit.sum(axis=axis) / count.sum(axis=axis),
        paired=True,
        n_resamples=4000,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.01)


def test_the_interval_holds_the_true_share_as_often_as_it_says() -> None:
    """Five orders, thirty requests, of which one in ten has answers that vary."""
    rng = np.random.default_rng(7)
    draws = 36_000
    answers = (rng.random((draws, 5)) < rng.random((draws, 1))) & (rng.random((draws, 1)) < 0.1)
    ones = answers.sum(axis=1)
    differing = ones * (5 - ones)  # pairs of orders
    truth = differing.mean() / 10
    held = []
    for sample in differing.reshape(-1, 30)[:1200]:
        share = clustered_share_of(sample.tolist(), [10] * 30)
        held.append(share.low <= truth <= share.high)
    assert 0.93 <= np.mean(held) <= 0.99


@pytest.mark.parametrize(
    ("only_first", "only_second", "both"), [(0, 1, 4), (2, 9, 12), (40, 22, 5), (3, 3, 0)]
)
def test_mcnemar_is_the_binomial_test_over_pairs_that_differ(
    only_first: int, only_second: int, both: int
) -> None:
    first = [True] * only_first + [False] * only_second + [True] * both
    second = [False] * only_first + [True] * only_second + [True] * both
    count, fewer = only_first + only_second, min(only_first, only_second)
    by_hand = min(1.0, 2 * sum(comb(count, k) for k in range(fewer + 1)) / 2**count)
    found = mcnemar(first, second)
    assert (found.only_first, found.only_second) == (only_first, only_second)
    assert found.p == pytest.approx(by_hand, rel=1e-9)


def test_mcnemar_is_the_paired_permutation_test() -> None:
    from scipy.stats import permutation_test

    first = [True, True, True, False, True, True, False, True, True, True]
    second = [False, False, True, False, True, False, True, False, True, False]
    exact = permutation_test(
        (np.array(first, dtype=float), np.array(second, dtype=float)),
        lambda one, other: (one - other).sum(),
        permutation_type="samples",
        vectorized=False,
        n_resamples=np.inf,
    )
    assert mcnemar(first, second).p == pytest.approx(exact.pvalue, rel=1e-9)


def test_arms_that_never_differ_give_no_evidence() -> None:
    assert mcnemar([True, False], [True, False]).p == 1.0
    with pytest.raises(ValueError, match="shorter"):
        mcnemar([True, False], [True])
