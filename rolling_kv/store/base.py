"""The contract of a store: segments' KV by lineage, never changed once stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rolling_kv.errors import StoreError
from rolling_kv.kv import ModelIdentity, SegmentKV
from rolling_kv.store.lineage import Lineage


class KVStore(Protocol):
    """Keeps KV by lineage. Safe to use from several threads; a folder, from several processes."""

    def claim(self, namespace: str, identity: ModelIdentity) -> None:
        """Binds `namespace` to a model, or checks that it is bound to this one.

        Raises:
            StoreModelMismatchError: it holds KV of another model.
        """
        ...

    def get(self, lineage: Lineage) -> SegmentKV | None:
        """The KV of that lineage, verified, or None when it was never stored.

        Raises:
            CorruptPayloadError: it failed verification and was quarantined; a later `get` returns None.
            StoreError: it could not be read this time, and was left as it is.
        """
        ...

    def get_many(self, lineages: Sequence[Lineage]) -> list[SegmentKV | StoreError | None]:
        """What `get` gives for each, in order; what it would raise stands in its place."""
        ...

    def put(self, lineage: Lineage, kv: SegmentKV) -> None:
        """Keeps `kv`, durably if the store is a folder. Storing a lineage again changes nothing.

        Raises:
            StoreFullError, StoreReadOnlyError, StoreLockedError: nothing was stored.
        """
        ...

    def stored_at(self, lineage: Lineage) -> float | None:
        """When that lineage was stored, in seconds since the epoch; None where that is not known."""
        ...

    def get_anchors(self, lineage: Lineage, kind: str) -> tuple[int, ...] | None:
        """The anchor tokens of that lineage by rule and ratio (`kind`), or None."""
        ...

    def put_anchors(self, lineage: Lineage, kind: str, tokens: tuple[int, ...]) -> None:
        """Keeps anchor tokens of a stored lineage as long as its KV. Storing them again changes nothing."""
        ...

    def forget(self, namespace: str, token_digest: str) -> int:
        """Removes all KV of `namespace` that was computed from a segment of that digest (`PathStep.digest`).

        That is the segment itself and everything conditioned on it, with anchors and what was quarantined.

        Returns:
            How many segments were removed.
        """
        ...

    def holds(self, token_digest: str) -> list[str]:
        """Keys, of any namespace, whose KV was computed from a segment of that digest, however it is kept."""
        ...

    def __len__(self) -> int:
        """How many segments it holds, over all namespaces."""
        ...

    def check_integrity(self) -> list[str]:
        """What does not hold of the store (empty when all does); reads every payload."""
        ...

    def close(self) -> None: ...
