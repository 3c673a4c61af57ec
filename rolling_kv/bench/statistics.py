"""Shares with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rolling_kv.errors import MissingExtraError


@dataclass(frozen=True, slots=True)
class Share:
    """`hits` of `count`, with the 95% Wilson score interval (Wilson, 1927)."""

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
    """The share of outcomes that are true; there must be at least one."""
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
