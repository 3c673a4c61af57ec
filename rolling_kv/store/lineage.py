"""Lineage: the hash of exactly what a stored KV was computed from. It is the store's key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash

from rolling_kv.kv import ModelIdentity

LINEAGE_VERSION = 3


@lru_cache(maxsize=4096)
def token_digest(token_ids: tuple[int, ...]) -> str:
    """xxh3-128 (hex) of a segment's token ids."""
    return xxhash.xxh3_128_hexdigest(np.asarray(token_ids, dtype="<u4").tobytes())


@dataclass(frozen=True, slots=True)
class PathStep:
    """One segment that took part: its token ids, and the position of its first token."""

    token_ids: tuple[int, ...]
    start: int

    @property
    def digest(self) -> str:
        return token_digest(self.token_ids)


@dataclass(frozen=True, slots=True)
class Lineage:
    """What one segment's KV was computed from; `path` ends with the segment itself.

    Each step of the path was computed after the ones before it, in a pass of its own, so the segmentation is
    part of the lineage: it decides the shapes of the passes, and with them the last bits.
    """

    identity: ModelIdentity
    namespace: str
    path: tuple[PathStep, ...]
    key: str

    @property
    def segment(self) -> PathStep:
        return self.path[-1]

    def describe(self) -> dict[str, Any]:
        """What a payload's header keeps: all that the key is made of, digests in the place of ids.

        What the model is called is not in it: equal models make equal files.
        """
        return {
            "version": LINEAGE_VERSION,
            "namespace": self.namespace,
            **_decisive(self.identity),
            "path": [[step.start, len(step.token_ids), step.digest] for step in self.path],
        }


def make_lineage(
    identity: ModelIdentity, *, namespace: str, path: Sequence[Sequence[int]], gap: int = 0
) -> Lineage:
    """The lineage of the last segment of `path`, after the ones before it, packed from position 0.

    Args:
        gap: positions left free after the first segment of several.
    """
    steps: list[PathStep] = []
    start = 0
    for index, token_ids in enumerate(path):
        start += gap if index == 1 else 0
        steps.append(PathStep(token_ids=tuple(token_ids), start=start))
        start += len(token_ids)
    digest = xxhash.xxh3_128(f"rolling_kv.lineage.v{LINEAGE_VERSION}".encode())
    for text in (*_decisive(identity).values(), namespace):
        data = text.encode("utf-8")
        digest.update(len(data).to_bytes(8, "little") + data)
    for step in steps:
        digest.update(f"{step.start},{len(step.token_ids)},{step.digest};".encode())
    return Lineage(identity=identity, namespace=namespace, path=tuple(steps), key=digest.hexdigest())


def _decisive(identity: ModelIdentity) -> dict[str, str]:
    """Every part of a model's identity that decides bits."""
    return {field.name: getattr(identity, field.name) for field in fields(identity) if field.name != "name"}
