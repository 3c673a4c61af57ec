"""Ingestion: every stored segment's KV at hand, from memory, from the store, or computed by its own pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rolling_kv.errors import StoreError
from rolling_kv.kv import SegmentKV
from rolling_kv.plan import StoredSegment
from rolling_kv.store import Lineage

if TYPE_CHECKING:
    from rolling_kv.engine.anchors import AnchorRule
    from rolling_kv.engine.host import TransformersHost
    from rolling_kv.store.base import KVStore

Progress = Callable[[int, int], None]
"""Called with how many segments are at hand, of how many."""


@dataclass(frozen=True, slots=True)
class AnchorKind:
    """Which tokens of a segment are its anchors, and how many of them (0 to 1)."""

    rule: AnchorRule
    ratio: float

    def __str__(self) -> str:
        return f"v2:{self.rule}:{self.ratio!r}"


@dataclass(slots=True)
class IngestReport:
    """What ingestion had to do: tokens computed, seconds taken, and what went wrong on the way."""

    computed: int = 0
    seconds: float = 0.0
    degraded: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Gathering:
    """What one call has found so far.

    Args:
        keep: keys of what is to be stored.
        at_hand: KV by key.
        absent: keys of what was looked for in the store and is not to be had from it.
    """

    keep: set[str]
    at_hand: dict[str, SegmentKV]
    absent: set[str]
    report: IngestReport


class Ingestor:
    """Provides the KV of a prompt's stored segments, and holds those of the last prompt in memory.

    A segment is computed by a pass of its own over the KV of its path, which is found or computed in the same
    way, so what is computed depends on lineage alone. The segments themselves are stored, and of what was
    computed merely as their context that which a later window begins with; the rest is dropped with the call.
    Beside the segments of the last prompt, those that a prompt to come will need may be kept in memory.
    """

    def __init__(
        self, *, engine: TransformersHost, store: KVStore, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._engine = engine
        self._store = store
        self._resident: dict[str, SegmentKV] = {}
        self._ahead: dict[str, SegmentKV] = {}
        self._anchors: dict[tuple[str, str], tuple[int, ...]] = {}  # by lineage, and by tokens alone

    def ensure(
        self,
        stored: Sequence[StoredSegment],
        *,
        anchors: AnchorKind | None = None,
        progress: Progress | None = None,
    ) -> tuple[list[SegmentKV], IngestReport]:
        """The KV of each segment, in order.

        Args:
            anchors: also has anchors of this kind at hand, in the store.

        Raises:
            StoreError: something could not be stored; what was stored before it stays valid.
        """
        started = self._clock()
        report = IngestReport()
        keep = {part.lineage.key for part in stored if not part.transient}
        keep |= {step.key for part in stored if part.keeps_context for step in part.lineages}
        own = {part.lineage.key: part.lineage for part in stored}
        missing = [lineage for key, lineage in own.items() if self._in_memory(key) is None]
        at_hand = self._load(missing, report)
        absent = {lineage.key for lineage in missing} - at_hand.keys()
        gathering = _Gathering(keep=keep, at_hand=at_hand, absent=absent, report=report)
        for done, part in enumerate(stored):
            path = {lineage.key for lineage in part.lineages}
            for key in at_hand.keys() - own.keys() - path:
                del at_hand[key]
            if progress is not None:
                progress(done, len(stored))
            self._obtain(part.lineages, gathering)
            if anchors is not None:
                self._anchors_of(part, anchors, kv=at_hand[part.lineage.key], report=report)
        if progress is not None:
            progress(len(stored), len(stored))
        self._resident = {part.lineage.key: at_hand[part.lineage.key] for part in stored}
        named = own.keys() | {part.lineage.segment.digest for part in stored}
        self._anchors = {key: found for key, found in self._anchors.items() if key[0] in named}
        report.seconds = self._clock() - started
        return [at_hand[part.lineage.key] for part in stored], report

    def chained(self, lineages: Sequence[Lineage]) -> int:
        """How many of `lineages`, each computed after the ones before it, are in memory without a gap."""
        count = 0
        for lineage in lineages:
            if self._in_memory(lineage.key) is None:
                break
            count += 1
        return count

    def held(self, paths: Sequence[Sequence[Lineage]]) -> int:
        """How many of `paths` end with a segment whose KV is in memory."""
        return sum(self._in_memory(path[-1].key) is not None for path in paths)

    def compute_ahead(
        self,
        paths: Sequence[Sequence[Lineage]],
        *,
        report: IngestReport,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> int:
        """Computes the next missing segment of those that a prompt to come needs, and keeps these alone.

        Args:
            paths: each ends with a segment that is needed, and begins with those that it is computed after.
            report: told what went wrong.
            interrupted: asked at every layer and segment; when it is true nothing more is begun.

        Returns:
            Tokens computed; 0 when nothing was missing.

        Raises:
            PassInterrupted: it was; what was there before is kept.
        """
        from rolling_kv.engine.host import PassInterrupted

        missing = []
        for path in paths:
            if interrupted():
                raise PassInterrupted
            if self._found(path[-1], report) is None:
                missing.append(path)
        wanted = {path[-1].key for path in paths} | {step.key for path in missing for step in path}
        self._ahead = {
            key: kv for key, kv in self._ahead.items() if key in wanted and key not in self._resident
        }
        if not missing:
            return 0
        context: list[SegmentKV] = []
        for lineage in missing[0]:
            kv = self._found(lineage, report)
            if kv is None:
                break
            context.append(kv)
        segment = lineage.segment
        self._ahead[lineage.key] = self._engine.extend(
            context, segment.token_ids, start=segment.start, interrupted=interrupted
        )
        return len(segment.token_ids)

    def _found(self, lineage: Lineage, report: IngestReport) -> SegmentKV | None:
        """KV from memory, or from the store, and then kept in memory."""
        kv = self._in_memory(lineage.key)
        if kv is None:
            kv = self._load([lineage], report).get(lineage.key)
            if kv is not None:
                self._ahead[lineage.key] = kv
        return kv

    def forget(self) -> None:
        """Drops everything that is held in memory."""
        self._resident, self._ahead, self._anchors = {}, {}, {}

    def anchors(
        self, stored: Sequence[StoredSegment], kind: AnchorKind, *, report: IngestReport
    ) -> list[tuple[int, ...]]:
        """The anchor tokens of each segment, as indices within it: from the store, or computed and stored.

        Call it after `ensure` with the same segments; what it had to do is added to `report`.
        """
        started = self._clock()
        found = [
            self._anchors_of(part, kind, kv=self._resident[part.lineage.key], report=report)
            for part in stored
        ]
        report.seconds += self._clock() - started
        return found

    def _anchors_of(
        self, part: StoredSegment, kind: AnchorKind, *, kv: SegmentKV, report: IngestReport
    ) -> tuple[int, ...]:
        """Anchors of one segment, a function of its tokens alone: known of one lineage, known of all."""
        from rolling_kv.engine.anchors import anchor_tokens

        segment = part.lineage.segment
        place, alone = (part.lineage.key, str(kind)), (segment.digest, str(kind))
        tokens = self._anchors.get(place) or self._store.get_anchors(part.lineage, str(kind))
        if tokens is None:
            tokens = self._anchors.get(alone)
            if tokens is None:
                if len(part.lineages) > 1:
                    kv = self._engine.extend([], segment.token_ids)
                    report.computed += len(kv)
                tokens = anchor_tokens(self._engine, kv, rule=kind.rule, ratio=kind.ratio)
                report.computed += len(kv) if kind.rule == "kvzip" else 0
            self._store.put_anchors(part.lineage, str(kind), tokens)
        self._anchors[place] = self._anchors[alone] = tokens
        return tokens

    def _obtain(self, lineages: Sequence[Lineage], gathering: _Gathering) -> SegmentKV:
        lineage, key = lineages[-1], lineages[-1].key
        kv = gathering.at_hand.get(key) or self._in_memory(key)
        if kv is None and key not in gathering.absent:
            kv = self._load([lineage], gathering.report).get(key)
        if kv is None:
            context = [self._obtain(lineages[: length + 1], gathering) for length in range(len(lineages) - 1)]
            kv = self._engine.extend(context, lineage.segment.token_ids, start=lineage.segment.start)
            gathering.report.computed += len(kv)
            if key in gathering.keep:
                self._store.put(lineage, kv.on_host())
        elif key in gathering.keep and key in self._ahead:  # what is made ahead is not stored
            self._store.put(lineage, kv.on_host())
            del self._ahead[key]
        gathering.at_hand[key] = kv
        return kv

    def _in_memory(self, key: str) -> SegmentKV | None:
        return self._resident.get(key) or self._ahead.get(key)

    def _load(self, lineages: Sequence[Lineage], report: IngestReport) -> dict[str, SegmentKV]:
        """KV from the store by key, as far as it is there and can be used."""
        loaded = {}
        for lineage, found in zip(lineages, self._store.get_many(lineages), strict=True):
            if isinstance(found, StoreError):  # damaged, or not to be read just now
                report.degraded.append(f"Stored KV was unusable and computed again: {found}")
            elif found is not None:
                loaded[lineage.key] = found
        return loaded
