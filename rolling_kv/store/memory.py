"""A store in memory, for sessions without a folder."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from rolling_kv.kv import ModelIdentity, SegmentKV
from rolling_kv.store.lineage import Lineage

DEFAULT_LIMIT = 4 * 1024**3


class MemoryStore:
    """Keeps the most recently used KV, up to `limit` bytes.

    What it drops is computed again when needed, with the same bits, since lineage decides them.
    """

    def __init__(self, *, limit: int = DEFAULT_LIMIT) -> None:
        self._limit = limit
        self._bytes = 0
        self._segments: OrderedDict[str, SegmentKV] = OrderedDict()
        self._anchors: dict[tuple[str, str], tuple[int, ...]] = {}  # a few numbers a segment, never dropped
        self._lock = Lock()

    def claim(self, namespace: str, identity: ModelIdentity) -> None:
        """Nothing to check: this store is born empty, and lineage keeps models apart."""

    def get(self, lineage: Lineage) -> SegmentKV | None:
        with self._lock:
            kv = self._segments.get(lineage.key)
            if kv is not None:
                self._segments.move_to_end(lineage.key)
            return kv

    def put(self, lineage: Lineage, kv: SegmentKV) -> None:
        with self._lock:
            if lineage.key in self._segments:
                return
            self._segments[lineage.key] = kv
            self._bytes += kv.nbytes
            while self._bytes > self._limit and len(self._segments) > 1:
                _, dropped = self._segments.popitem(last=False)
                self._bytes -= dropped.nbytes

    def get_anchors(self, lineage: Lineage, kind: str) -> tuple[int, ...] | None:
        return self._anchors.get((lineage.key, kind))

    def put_anchors(self, lineage: Lineage, kind: str, tokens: tuple[int, ...]) -> None:
        self._anchors[lineage.key, kind] = tokens

    def __len__(self) -> int:
        return len(self._segments)

    def check_integrity(self) -> list[str]:
        held = sum(kv.nbytes for kv in self._segments.values())
        return [] if held == self._bytes else [f"counts {self._bytes} bytes and holds {held}"]

    def close(self) -> None:
        self._segments.clear()
        self._anchors.clear()
        self._bytes = 0
