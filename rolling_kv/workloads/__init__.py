"""Seeded workloads made here, and a user's own. `LABELLED` maps a name to a factory of labelled requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from rolling_kv.errors import UnknownWorkloadError
from rolling_kv.registry import Registry
from rolling_kv.workloads.jsonl import read_requests, write_requests
from rolling_kv.workloads.market import (
    Detail,
    EventKind,
    MarketEvent,
    MarketQuestion,
    copy_question,
    market_events,
    market_question,
)
from rolling_kv.workloads.needle import needle_requests
from rolling_kv.workloads.request import LabelledRequest, TextSpan, holds_whole


class RequestFactory(Protocol):
    """Makes the endless labelled requests of a seed, over that many documents each."""

    def __call__(self, seed: int, *, documents: int) -> Iterator[LabelledRequest]: ...


LABELLED: Registry[RequestFactory] = Registry("labelled workload", UnknownWorkloadError)
LABELLED.register("needle", lambda: needle_requests)

__all__ = [
    "LABELLED",
    "Detail",
    "EventKind",
    "LabelledRequest",
    "MarketEvent",
    "MarketQuestion",
    "RequestFactory",
    "TextSpan",
    "copy_question",
    "holds_whole",
    "market_events",
    "market_question",
    "needle_requests",
    "read_requests",
    "write_requests",
]
