"""What a replay measures: one row for each request of each order of each arm."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ReferenceRow:
    """Full prefill's greedy answer to one request, by the stock forward of transformers.

    Args:
        request: its number in the history, from 0.
        prompt_digest: xxh3-128 (hex) of the prompt's token ids.
        segments: names of the prompt's segments, in order; a document's name is its id.
        margins: between the two likeliest tokens where each token of the answer was chosen, and its end, in
            logits.
        right: whether it is the expected answer; None when that is not known.
        ttft: seconds.
    """

    request: int
    prompt_digest: str
    prompt_tokens: int
    segments: tuple[str, ...]
    query: str
    token_ids: tuple[int, ...]
    text: str
    margins: tuple[float, ...]
    right: bool | None
    ttft: float

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "reference"} | asdict(self)

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Self:
        return cls(**_tuples(row))


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """One request, answered by one arm after the requests that one order put before it.

    Args:
        arm, order: their names.
        position: the place of the request in this order, from 0.
        request: its number in the history, from 0; the same request has the same prompt in every order.
        margins: as in `ReferenceRow`.
        logits_fingerprint: of the first token's logits; equal for equal bits.
        kv_fingerprint: of the KV that the answer was decoded from, by layer and segment; see `kv_grid`.
            Empty under full prefill.
        lineages: the store key of every stored segment in the prompt, in order.
        top1: the share of positions of the reference answer at which both predict the same token.
        kl: mean KL(full prefill || arm) over those positions, in nats.
        segments, k, captured_deviation: as in `SelectionStats`.
        prefix, reused, recomputed, computed: prompt tokens, as in `Usage`.
        ttft: seconds.
        degraded: as in `Usage`.
    """

    arm: str
    order: str
    position: int
    request: int
    prompt_digest: str
    token_ids: tuple[int, ...]
    text: str
    margins: tuple[float, ...]
    logits_fingerprint: str
    kv_fingerprint: str
    lineages: tuple[str, ...]
    top1: float
    kl: float
    segments: int
    k: int
    captured_deviation: float | None
    prefix: int
    reused: int
    recomputed: int
    computed: int
    ttft: float
    degraded: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "replay"} | asdict(self)

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Self:
        return cls(**_tuples(row))


def kv_grid(fingerprint: str, *, segments: int) -> NDArray[np.uint32]:
    """The hashes in a `kv_fingerprint`, [layers, segments], for so many segments of the prompt.

    A fingerprint is the hexadecimal of little-endian 32-bit hashes, layer by layer.
    """
    return np.frombuffer(bytes.fromhex(fingerprint), dtype="<u4").reshape(-1, segments)


def _tuples(row: dict[str, Any]) -> dict[str, Any]:
    """A row as it was read from JSON, as the arguments of its class."""
    return {
        key: tuple(value) if isinstance(value, list) else value for key, value in row.items() if key != "kind"
    }
