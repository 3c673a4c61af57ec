"""KV taken from fused prompts: what answers that depend on history are made of.

It is the control of this project, and what caches in use do. It is kept in memory only: a store holds nothing
but KV that is a function of its lineage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from rolling_kv.kv import SegmentKV
from rolling_kv.plan import Plan
from rolling_kv.store import token_digest
from rolling_kv.window import Segment


class FusedHistory:
    """The KV that documents had in the fused prompt that first, or last, held them, for the session's life.

    Args:
        keep: the `first` fused KV of a document, or `always` the newest.
    """

    def __init__(self, keep: Literal["first", "always"]) -> None:
        self._keep = keep
        self._segments: dict[str, SegmentKV] = {}
        self._seen: dict[
            str, frozenset[str]
        ] = {}  # what the KV of each key was computed from, itself included

    def __contains__(self, key: str) -> bool:
        return key in self._segments

    def __getitem__(self, key: str) -> SegmentKV:
        return self._segments[key]

    def seen(self, key: str) -> frozenset[str]:
        """The digests of all documents that took part in the KV of `key`, its own included."""
        return self._seen[key]

    def take(self, plan: Plan, keys: dict[str, str], segment_kv: Callable[[Segment], SegmentKV]) -> None:
        """Takes over the KV of a prompt that was fused.

        Args:
            keys: of every document in the prompt, by its name there.
            segment_kv: the fused KV of a segment.
        """
        documents = [segment for segment in plan.prompt.context if segment.kind == "document"]
        before: frozenset[str] = frozenset()
        for segment in documents:
            key = keys[segment.name]
            before |= {token_digest(segment.token_ids)} | self._seen.get(key, frozenset())
            if self._keep == "always" or key not in self._segments:
                self._segments[key] = segment_kv(segment)
                self._seen[key] = before

    def forget(self, digest: str) -> int:
        """Drops everything that the document of `digest` took part in; how many documents that were."""
        tainted = [one for one, seen in self._seen.items() if digest in seen]
        for one in tainted:
            del self._segments[one], self._seen[one]
        return len(tainted)
