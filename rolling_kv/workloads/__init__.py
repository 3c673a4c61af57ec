"""Seeded workloads made here: rolling market events."""

from __future__ import annotations

from rolling_kv.workloads.market import (
    Detail,
    EventKind,
    MarketEvent,
    MarketQuestion,
    copy_question,
    market_events,
    market_question,
)

__all__ = [
    "Detail",
    "EventKind",
    "MarketEvent",
    "MarketQuestion",
    "copy_question",
    "market_events",
    "market_question",
]
