"""A store over another one, so that what is measured starts from the same KV and changes none of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rolling_kv.store import Lineage

if TYPE_CHECKING:
    from rolling_kv.errors import StoreError
    from rolling_kv.kv import ModelIdentity, SegmentKV
    from rolling_kv.store.base import KVStore


class Layered:
    """A store over another one: reads from both, writes to `top` alone. Closing it closes neither."""

    def __init__(self, base: KVStore, top: KVStore) -> None:
        self._base, self._top = base, top

    def claim(self, namespace: str, identity: ModelIdentity) -> None:
        self._top.claim(namespace, identity)

    def get(self, lineage: Lineage) -> SegmentKV | None:
        return self._top.get(lineage) or self._base.get(lineage)

    def get_many(self, lineages: Sequence[Lineage]) -> list[SegmentKV | StoreError | None]:
        found = self._top.get_many(lineages)
        missing = [lineage for lineage, kv in zip(lineages, found, strict=True) if kv is None]
        rest = iter(self._base.get_many(missing))
        return [next(rest) if kv is None else kv for kv in found]

    def put(self, lineage: Lineage, kv: SegmentKV) -> None:
        self._top.put(lineage, kv)

    def stored_at(self, lineage: Lineage) -> float | None:
        return self._top.stored_at(lineage) or self._base.stored_at(lineage)

    def get_anchors(self, lineage: Lineage, kind: str) -> tuple[int, ...] | None:
        return self._top.get_anchors(lineage, kind) or self._base.get_anchors(lineage, kind)

    def put_anchors(self, lineage: Lineage, kind: str, tokens: tuple[int, ...]) -> None:
        self._top.put_anchors(lineage, kind, tokens)

    def forget(self, namespace: str, token_digest: str) -> int:
        return self._top.forget(namespace, token_digest)

    def holds(self, token_digest: str) -> list[str]:
        return sorted({*self._top.holds(token_digest), *self._base.holds(token_digest)})

    def __len__(self) -> int:
        return len(self._top) + len(self._base)

    def check_integrity(self) -> list[str]:
        return self._top.check_integrity() + self._base.check_integrity()

    def close(self) -> None:
        """Leaves both open for the next session."""
