"""Seeded workloads made here, and a user's own. `LABELLED` maps a name to a factory of labelled requests."""

from __future__ import annotations

from collections.abc import Iterator
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


LABELLED: Registry[RequestFactory] = Registry("labelled workload", UnknownWorkloadError)
LABELLED.register("needle", lambda: needle_requests)
LABELLED.register("rolling-needle", lambda: rolling_needle_requests)
LABELLED.register("multi-query", lambda: multi_query_requests)
LABELLED.register("multi-value", lambda: multi_value_requests)
LABELLED.register("variable-tracking", lambda: variable_tracking_requests)
LABELLED.register("market", lambda: partial(market_requests, detail="short", question="field"))
LABELLED.register("market-copy", lambda: partial(market_requests, detail="long", question="copy"))

ROLLING = frozenset({"market", "market-copy", "rolling-needle"})
"""Names of those whose window loses its oldest document and gains one from request to request."""

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
