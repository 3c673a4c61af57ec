"""Eviction: which segments have to go for a store to keep to its bounds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rolling_kv.store.index import SegmentRow


@dataclass(frozen=True, slots=True)
class GcReport:
    """What was removed, or would be, and how much is kept."""

    removed: tuple[SegmentRow, ...]
    kept: int
    kept_bytes: int

    @property
    def freed(self) -> int:
        """Bytes."""
        return sum(row.bytes for row in self.removed)


def surplus(
    by_use: Iterable[SegmentRow],
    *,
    held: int,
    max_bytes: int | None,
    oldest_use: float | None,
    keep: str | None = None,
) -> list[SegmentRow]:
    """The segments that have to go: not used since `oldest_use`, and the least recently used above a size.

    Args:
        by_use: the segments, least recently used first; read no further than needed.
        held: bytes that all of them take.
        max_bytes: that size.
        oldest_use: seconds since the epoch.
        keep: a key that stays whatever it takes.
    """
    removed = []
    for row in by_use:
        outdated = oldest_use is not None and row.used < oldest_use
        too_much = max_bytes is not None and held > max_bytes
        if not outdated and not too_much:
            break
        if row.key != keep:
            removed.append(row)
            held -= row.bytes
    return removed
