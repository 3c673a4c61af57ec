"""A store in memory, for sessions without a folder."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock

from rolling_kv.errors import ConfigError, StoreError
from rolling_kv.kv import ModelIdentity, SegmentKV
from rolling_kv.store.lineage import Lineage

DEFAULT_LIMIT = 4 * 1024**3


@dataclass(frozen=True, slots=True)
class _Held:
    kv: SegmentKV
    namespace: str
    digests: frozenset[str]  # of the steps of its path
    anchors: dict[str, tuple[int, ...]] = field(default_factory=dict)


class MemoryStore:
    """Keeps the most recently used KV, up to `limit` bytes; one segment larger than that is kept alone.

    What it drops is computed again when needed, with the same bits, since lineage decides them.

    Raises:
        ConfigError: `limit` is not positive.
    """

    def __init__(self, *, limit: int = DEFAULT_LIMIT) -> None:
        if limit < 1:
            raise ConfigError(f"memory_limit is {limit}; expected at least 1 byte.")
        self._limit = limit
        self._bytes = 0
        self._segments: OrderedDict[str, _Held] = OrderedDict()
        self._lock = Lock()

    def claim(self, namespace: str, identity: ModelIdentity) -> None:
        """Nothing to check: this store is born empty, and lineage keeps models apart."""

    def get(self, lineage: Lineage) -> SegmentKV | None:
        with self._lock:
            held = self._segments.get(lineage.key)
            if held is None:
                return None
            self._segments.move_to_end(lineage.key)
            return held.kv

    def get_many(self, lineages: Sequence[Lineage]) -> list[SegmentKV | StoreError | None]:
        return [self.get(lineage) for lineage in lineages]

    def put(self, lineage: Lineage, kv: SegmentKV) -> None:
        with self._lock:
            if lineage.key in self._segments:
                return
            digests = frozenset(step.digest for step in lineage.path)
            self._segments[lineage.key] = _Held(kv=kv, namespace=lineage.namespace, digests=digests)
            self._bytes += kv.nbytes
            while self._bytes > self._limit and len(self._segments) > 1:
                self._drop(next(iter(self._segments)))

    def stored_at(self, lineage: Lineage) -> float | None:
        """Memory keeps no dates."""
        return None

    def get_anchors(self, lineage: Lineage, kind: str) -> tuple[int, ...] | None:
        with self._lock:
            held = self._segments.get(lineage.key)
            return None if held is None else held.anchors.get(kind)

    def put_anchors(self, lineage: Lineage, kind: str, tokens: tuple[int, ...]) -> None:
        with self._lock:
            held = self._segments.get(lineage.key)
            if held is not None:
                held.anchors[kind] = tokens

    def forget(self, namespace: str, token_digest: str) -> int:
        with self._lock:
            keys = [
                key
                for key, held in self._segments.items()
                if held.namespace == namespace and token_digest in held.digests
            ]
            for key in keys:
                self._drop(key)
            return len(keys)

    def holds(self, token_digest: str) -> list[str]:
        with self._lock:
            return sorted(key for key, held in self._segments.items() if token_digest in held.digests)

    def __len__(self) -> int:
        return len(self._segments)

    def check_integrity(self) -> list[str]:
        held = sum(one.kv.nbytes for one in self._segments.values())
        return [] if held == self._bytes else [f"counts {self._bytes} bytes and holds {held}"]

    def close(self) -> None:
        self._segments.clear()
        self._bytes = 0

    def _drop(self, key: str) -> None:
        self._bytes -= self._segments.pop(key).kv.nbytes
