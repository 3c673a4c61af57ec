"""Provenance: what the KV of each segment of a window was computed from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rolling_kv.history import FusedHistory
from rolling_kv.kv import ModelIdentity
from rolling_kv.plan import Plan
from rolling_kv.store import token_digest

if TYPE_CHECKING:
    from rolling_kv.store.base import KVStore


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where the KV of one segment comes from.

    Args:
        name: the document's id, or "instruction".
        key: of the lineage; "" where a segment has no stored KV and is computed in every call.
        made: `prefilled` by a canonical pass; `fused`, taken from a fused prompt; `computed` in every call.
        moved: whether it is remapped to another position than it was computed at.
        computed_after: digests of the segments that its KV has seen, in order: of a prefilled one its path,
            of a fused one every document that took part, in no order.
        conditioning: the mode.
        stored_at: when it was first stored, in seconds since the epoch; None in memory.
    """

    name: str
    key: str
    identity: ModelIdentity
    namespace: str
    conditioning: str
    made: Literal["prefilled", "fused", "computed"]
    moved: bool
    exact: bool
    computed_after: tuple[str, ...]
    stored_at: float | None


def provenance_of(
    plan: Plan,
    *,
    conditioning: str,
    identity: ModelIdentity,
    namespace: str,
    store: KVStore,
    history: FusedHistory | None,
) -> list[Provenance]:
    """The provenance of every segment of a prompt without its query."""
    stored = {part.segment.start: part for part in plan.stored}
    found = []
    for segment in plan.prompt.context:
        part = stored.get(segment.start)
        fused = history is not None and segment.kind == "document"
        key = "" if part is None else part.lineage.key
        after: tuple[str, ...] = ()
        start = segment.start
        if part is not None and fused:
            assert history is not None
            own = token_digest(segment.token_ids)
            after, start = tuple(sorted(history.seen(key) - {own})), history[key].start
        elif part is not None:
            after = tuple(step.digest for step in part.lineage.path[:-1])
            start = part.lineage.segment.start
        found.append(
            Provenance(
                name=segment.name,
                key=key,
                identity=identity,
                namespace=namespace,
                conditioning=conditioning,
                made="computed" if part is None else "fused" if fused else "prefilled",
                moved=start != segment.start,
                exact=part is not None and segment.stop <= plan.prefix,
                computed_after=after,
                stored_at=None if part is None or fused else store.stored_at(part.lineage),
            )
        )
    return found
