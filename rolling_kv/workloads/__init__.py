"""Seeded workloads made here, and a user's own. `LABELLED` maps a name to a factory of labelled requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Protocol

from rolling_kv.errors import UnknownWorkloadError
from rolling_kv.registry import Registry
from rolling_kv.workloads.jsonl import read_requests, write_requests
from rolling_kv.workloads.market import (
    Detail,
    EventKind,
    MarketEvent,
    MarketQuestion,
    QuestionKind,
    copy_question,
    market_events,
    market_question,
    market_requests,
)
from rolling_kv.workloads.needle import needle_requests, rolling_needle_requests
from rolling_kv.workloads.request import LabelledRequest, TextSpan, holds_whole
from rolling_kv.workloads.ruler import (
    multi_query_requests,
    multi_value_requests,
    variable_tracking_requests,
)


class RequestFactory(Protocol):
    """Makes the endless labelled requests of a seed, over that many documents each."""

    def __call__(self, seed: int, *, documents: int) -> Iterator[LabelledRequest]: ...


class RollingRequestFactory(Protocol):
    """The same over a window that loses its oldest document and gains one, once it was asked so often."""

    def __call__(self, seed: int, *, documents: int, questions: int = 1) -> Iterator[LabelledRequest]: ...


ROLLING: Mapping[str, RollingRequestFactory] = {
    "market": partial(market_requests, detail="short", question="field"),
    "market-copy": partial(market_requests, detail="long", question="copy"),
    "rolling-needle": rolling_needle_requests,
}
"""Those of `LABELLED` whose window rolls."""

LABELLED: Registry[RequestFactory] = Registry("labelled workload", UnknownWorkloadError)
LABELLED.register("needle", lambda: needle_requests)
LABELLED.register("multi-query", lambda: multi_query_requests)
LABELLED.register("multi-value", lambda: multi_value_requests)
LABELLED.register("variable-tracking", lambda: variable_tracking_requests)
for _name in ROLLING:
    LABELLED.register(_name, partial(ROLLING.__getitem__, _name))

__all__ = [
    "LABELLED",
    "ROLLING",
    "Detail",
    "EventKind",
    "LabelledRequest",
    "MarketEvent",
    "MarketQuestion",
    "QuestionKind",
    "RequestFactory",
    "RollingRequestFactory",
    "TextSpan",
    "copy_question",
    "holds_whole",
    "market_events",
    "market_question",
    "market_requests",
    "multi_query_requests",
    "multi_value_requests",
    "needle_requests",
    "read_requests",
    "rolling_needle_requests",
    "variable_tracking_requests",
    "write_requests",
]
