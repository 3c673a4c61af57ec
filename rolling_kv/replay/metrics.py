"""The figures of a replay: how far answers depend on the order, and how near they are to full prefill.

Answer variation and fidelity are those of "Request Order Matters" (section 4.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import fmean, median
from typing import Any

import numpy as np

from rolling_kv.bench.statistics import PairedTest, Share, clustered_share_of, mcnemar, share_of
from rolling_kv.replay.parting import TIE_TOLERANCE, Parting, parting_of
from rolling_kv.replay.rows import ReplayRow
from rolling_kv.replay.runs import CHRONOLOGICAL, REPEAT, RESET, Runs, is_faithful


@dataclass(frozen=True, slots=True)
class OrderFigures:
    """One order of one arm.

    Args:
        fidelity: the share of requests whose answer is full prefill's, token by token.
        top1, kl: means over requests of the figures in `ReplayRow`.
        segments, captured_deviation: medians; the latter None where it was not measured.
        ttft_median, ttft_p95: seconds.
        speedup: the median over requests of full prefill's TTFT for that request over the arm's.
    """

    order: str
    requests: int
    fidelity: Share
    top1: float
    kl: float
    segments: float
    captured_deviation: float | None
    ttft_median: float
    ttft_p95: float
    speedup: float


@dataclass(frozen=True, slots=True)
class Repeat:
    """The chronological order once more: of how many requests, and in how many of them something differs.

    Args:
        answers, logits, kv: the tokens of the answer, the bits of its first logits, the bits of its KV.
    """

    requests: int
    answers: int
    logits: int
    kv: int

    @property
    def exact(self) -> bool:
        return not (self.answers or self.logits or self.kv)


@dataclass(frozen=True, slots=True)
class ArmFigures:
    """One arm, over its orders; controls stand by themselves.

    Args:
        orders: without controls.
        total: all of them together; its share counts the answers of one request as dependent.
        variation: the share of pairs of orders whose answers differ, over the pairs of all requests; None
            where fewer than two orders hold a request, and so for the next three.
        varying, logits_differ, kv_differ: the share of requests for which any two orders differ in the
            answer, the bits of the first token's logits, the bits of the KV.
        partings: of all pairs of orders whose answers differ.
        repeat, reset: the controls; None where they were not run.
        repeat_partings: of the answers in which the repeat differs from the chronological order.
        missing: order to how many requests it lacks, where it lacks any.
        degraded: what could not be done as asked, from all rows.
    """

    arm: str
    orders: tuple[OrderFigures, ...]
    total: OrderFigures
    variation: Share | None
    varying: Share | None
    logits_differ: Share | None
    kv_differ: Share | None
    partings: tuple[Parting, ...]
    repeat: Repeat | None
    repeat_partings: tuple[Parting, ...]
    reset: OrderFigures | None
    missing: dict[str, int]
    degraded: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        repeat = {} if self.repeat is None else {"repeat": asdict(self.repeat) | {"exact": self.repeat.exact}}
        return asdict(self) | repeat


@dataclass(frozen=True, slots=True)
class Comparison:
    """The fidelity of two arms in one order, over the requests that both hold.

    Args:
        test: an outcome is an answer equal to full prefill's.
        difference: the first arm's fidelity less the second's.
    """

    first: str
    second: str
    order: str
    requests: int
    difference: float
    test: PairedTest


def figures_of(runs: Runs, arm: str, *, tolerance: float = TIE_TOLERANCE) -> ArmFigures:
    """All figures of one arm.

    Args:
        tolerance: logits; see `parting.TIE_TOLERANCE`.
    """
    held = runs.arms[arm]
    orders = runs.orders(arm)
    return ArmFigures(
        arm=arm,
        orders=tuple(_order_figures(runs, order, held[order].values()) for order in orders),
        total=_order_figures(runs, "all", runs.rows(arm)),
        variation=_variation(runs, arm),
        varying=_any_differ(runs, arm, "token_ids"),
        logits_differ=_any_differ(runs, arm, "logits_fingerprint"),
        kv_differ=_any_differ(runs, arm, "kv_fingerprint"),
        partings=_partings(runs, (pair for _, pairs in runs.pairs(arm) for pair in pairs), tolerance),
        repeat=_repeat(runs, arm),
        repeat_partings=_partings(runs, _repeated(runs, arm), tolerance),
        reset=_order_figures(runs, RESET, held[RESET].values()) if RESET in held else None,
        missing=runs.missing(arm),
        degraded=tuple(
            sorted({reason for rows in held.values() for row in rows.values() for reason in row.degraded})
        ),
    )


def comparisons_of(runs: Runs) -> tuple[Comparison, ...]:
    """Every two arms in every order that both hold, controls included (the reset one is the paper's)."""
    found = []
    for first, second in combinations(runs.arms, 2):
        for order in runs.arms[first]:
            both = [request for request in runs.arms[first][order] if request in _held(runs, second, order)]
            if not both or order == REPEAT:
                continue
            faithful = [
                [is_faithful(runs.arms[arm][order][request], runs.references[request]) for request in both]
                for arm in (first, second)
            ]
            found.append(
                Comparison(
                    first=first,
                    second=second,
                    order=order,
                    requests=len(both),
                    difference=(sum(faithful[0]) - sum(faithful[1])) / len(both),
                    test=mcnemar(*faithful),
                )
            )
    return tuple(found)


def _order_figures(runs: Runs, order: str, rows: Iterable[ReplayRow]) -> OrderFigures:
    rows = list(rows)
    faithful: dict[int, list[bool]] = {}
    for row in rows:
        faithful.setdefault(row.request, []).append(is_faithful(row, runs.references[row.request]))
    captured = [row.captured_deviation for row in rows if row.captured_deviation is not None]
    ttfts = [row.ttft for row in rows]
    return OrderFigures(
        order=order,
        requests=len(faithful),
        fidelity=_share(list(faithful.values())),
        top1=fmean(row.top1 for row in rows),
        kl=fmean(row.kl for row in rows),
        segments=median(row.segments for row in rows),
        captured_deviation=median(captured) if captured else None,
        ttft_median=median(ttfts),
        ttft_p95=float(np.percentile(ttfts, 95)),
        speedup=median(runs.references[row.request].ttft / row.ttft for row in rows),
    )


def _share(clusters: Sequence[Sequence[bool]]) -> Share:
    """Wilson's where each request counts once."""
    if all(len(one) == 1 for one in clusters):
        return share_of([one[0] for one in clusters])
    return clustered_share_of([sum(one) for one in clusters], [len(one) for one in clusters])


def _variation(runs: Runs, arm: str) -> Share | None:
    differing = [[one.token_ids != other.token_ids for one, other in pairs] for _, pairs in runs.pairs(arm)]
    return _share(differing) if differing else None


def _any_differ(runs: Runs, arm: str, field: str) -> Share | None:
    differing = [
        any(getattr(one, field) != getattr(other, field) for one, other in pairs)
        for _, pairs in runs.pairs(arm)
    ]
    return share_of(differing) if differing else None


def _partings(
    runs: Runs, pairs: Iterable[tuple[ReplayRow, ReplayRow]], tolerance: float
) -> tuple[Parting, ...]:
    found = (
        parting_of(one, other, runs.references[one.request], tolerance=tolerance) for one, other in pairs
    )
    return tuple(parting for parting in found if parting is not None)


def _held(runs: Runs, arm: str, order: str) -> dict[int, ReplayRow]:
    return runs.arms[arm].get(order, {})


def _repeated(runs: Runs, arm: str) -> list[tuple[ReplayRow, ReplayRow]]:
    """The requests that both the chronological order and its repeat hold."""
    first, again = _held(runs, arm, CHRONOLOGICAL), _held(runs, arm, REPEAT)
    return [(first[request], again[request]) for request in first if request in again]


def _repeat(runs: Runs, arm: str) -> Repeat | None:
    both = _repeated(runs, arm)
    if not both:
        return None
    return Repeat(
        requests=len(both),
        answers=sum(one.token_ids != other.token_ids for one, other in both),
        logits=sum(one.logits_fingerprint != other.logits_fingerprint for one, other in both),
        kv=sum(one.kv_fingerprint != other.kv_fingerprint for one, other in both),
    )
