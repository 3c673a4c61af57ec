"""Shares with their intervals, and tests of paired outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist

from rolling_kv.errors import MissingExtraError


@dataclass(frozen=True, slots=True)
class Share:
    """`hits` of `count`, with a 95% score interval: see `share_of` and `clustered_share_of`."""

    hits: int
    count: int
    share: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.share:.2f} ({self.low:.2f} to {self.high:.2f})"


def require_statistics() -> None:
    """Fails early where intervals cannot be computed.

    Raises:
        MissingExtraError
    """
    try:
        import scipy.stats  # noqa: F401  # only whether it is there
    except ImportError as error:
        raise MissingExtraError(
            "Intervals need scipy, which is not installed. Run: pip install 'rolling-kv[bench]'"
        ) from error


def share_of(outcomes: Sequence[bool]) -> Share:
    """The share of outcomes that are true, with the Wilson score interval (Wilson, 1927).

    There must be at least one.
    """
    require_statistics()
    from scipy.stats import binomtest

    hits = sum(outcomes)
    interval = binomtest(hits, len(outcomes)).proportion_ci(0.95, method="wilson")
    return Share(
        hits=hits,
        count=len(outcomes),
        share=hits / len(outcomes),
        low=float(interval.low),
        high=float(interval.high),
    )


def clustered_share_of(hits: Sequence[int], counts: Sequence[int]) -> Share:
    """A share over clusters whose outcomes depend on each other, such as the pairs of orders of one request.

    The interval is Wilson's with the effective sample size that the variance between clusters leaves (Korn
    and Graubard, 1998; Dean and Pagano, 2015). A share of 0 or 1 leaves no variance to see: there every
    cluster counts as one outcome. Unlike a bootstrap over clusters, it holds its level where few have hits.

    Args:
        hits, counts: of each cluster; at least one cluster, and no count is 0.
    """
    clusters, total = len(counts), sum(counts)
    share = sum(hits) / total
    effective = float(clusters)
    if 0 < share < 1 and clusters > 1:
        squares = sum((hit - share * count) ** 2 for hit, count in zip(hits, counts, strict=True))
        variance = squares / total**2 * clusters / (clusters - 1)
        effective = min(total, share * (1 - share) / variance) if variance else total
    low, high = _wilson(share, effective)
    return Share(hits=sum(hits), count=total, share=share, low=low, high=high)


@dataclass(frozen=True, slots=True)
class PairedTest:
    """Two arms on the same requests.

    Args:
        only_first, only_second: how often one alone had the outcome.
        p: two-sided, that both have it equally often; not corrected for the number of tests.
    """

    only_first: int
    only_second: int
    p: float


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> PairedTest:
    """The exact test of McNemar (1947): the binomial one over the pairs that differ, of any number.

    Args:
        first, second: the outcomes of both arms, in the same order of requests.
    """
    require_statistics()
    from scipy.stats import binomtest

    pairs = list(zip(first, second, strict=True))
    only_first = sum(one and not other for one, other in pairs)
    only_second = sum(other and not one for one, other in pairs)
    differing = only_first + only_second
    p = float(binomtest(only_first, differing, 0.5).pvalue) if differing else 1.0
    return PairedTest(only_first=only_first, only_second=only_second, p=p)


def _wilson(share: float, count: float) -> tuple[float, float]:
    """For a count that need not be whole, which scipy does not take."""
    z = NormalDist().inv_cdf(0.975)
    centre = share + z * z / (2 * count)
    half = z * sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    low, high = ((centre + side) / (1 + z * z / count) for side in (-half, half))
    return max(0.0, low), min(1.0, high)
