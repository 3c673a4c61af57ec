"""Where two orders part for one request."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any, Literal, TypeVar

import numpy as np

from rolling_kv.replay.rows import ReferenceRow, ReplayRow, kv_grid

TIE_TOLERANCE = 1e-3
"""Logits. Below it, which of two tokens is the likelier is a matter of rounding."""

T = TypeVar("T")
Kind = Literal["history", "tie", "nondeterminism"]

MEANING: dict[Kind, str] = {
    "history": "the KV differs, and in an order at least the answer is no close call",
    "tie": "the KV differs, and in both orders two tokens are equally likely to within the tolerance",
    "nondeterminism": "the KV has equal bits, so the run itself varies",
}


@dataclass(frozen=True, slots=True)
class Parting:
    """Two orders that gave one prompt different answers.

    The kind follows from bits and margins alone. `nondeterminism`: the KV that both answers were decoded from
    has equal bits (or there is none, under full prefill). Otherwise `tie` where both margins are below the
    tolerance, and `history` where either is not, or is not known.

    Args:
        orders, texts: of both.
        token: the first place in the answers, from 0, at which they differ.
        tokens: both ids there; None where the answer has ended.
        margins: of both there, in logits; None where it was not recorded.
        layer, segment: the lowest layer whose KV differs, and the first segment that differs there, from 0;
            None where the KV is equal, or was not recorded for both.
        segment_name: of that segment; a document's name is its id.
    """

    arm: str
    request: int
    orders: tuple[str, str]
    texts: tuple[str, str]
    token: int
    tokens: tuple[int | None, int | None]
    margins: tuple[float | None, float | None]
    layer: int | None
    segment: int | None
    segment_name: str | None
    kind: Kind

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def parting_of(
    one: ReplayRow, other: ReplayRow, reference: ReferenceRow, *, tolerance: float = TIE_TOLERANCE
) -> Parting | None:
    """Where the answers of two orders to the same request part; None where they are equal.

    Args:
        tolerance: logits, see `TIE_TOLERANCE`.
    """
    if one.token_ids == other.token_ids:
        return None
    token = next(index for index, (a, b) in enumerate(zip_longest(one.token_ids, other.token_ids)) if a != b)
    margins = _at(one.margins, token), _at(other.margins, token)
    place = first_difference(one, other, reference)
    return Parting(
        arm=one.arm,
        request=one.request,
        orders=(one.order, other.order),
        texts=(one.text, other.text),
        token=token,
        tokens=(_at(one.token_ids, token), _at(other.token_ids, token)),
        margins=margins,
        layer=None if place is None else place[0],
        segment=None if place is None else place[1],
        segment_name=None if place is None else reference.segments[place[1]],
        kind=_kind(one, other, margins, tolerance=tolerance),
    )


def first_difference(one: ReplayRow, other: ReplayRow, reference: ReferenceRow) -> tuple[int, int] | None:
    """The lowest layer at which the KV of two orders differs, and the first segment that differs there."""
    if not (one.kv_fingerprint and other.kv_fingerprint) or one.kv_fingerprint == other.kv_fingerprint:
        return None
    segments = len(reference.segments)
    grids = [kv_grid(row.kv_fingerprint, segments=segments) for row in (one, other)]
    layer, segment = np.argwhere(grids[0] != grids[1])[0].tolist()
    return layer, segment


def sentence(parting: Parting) -> str:
    """Where and why, in words."""
    if parting.kind == "nondeterminism":
        cause = "their KV has equal bits, so the run itself varies"
    elif parting.layer is None:
        cause = "only one of them used stored KV"
    else:
        cause = f"their KV differs first at layer {parting.layer}, in {parting.segment_name!r}"
    margins = " and ".join("unknown" if one is None else f"{one:.4g}" for one in parting.margins)
    return f"{parting.kind}: {cause}; the answers part at token {parting.token}, margins {margins} logits"


def _kind(
    one: ReplayRow, other: ReplayRow, margins: tuple[float | None, float | None], *, tolerance: float
) -> Kind:
    if one.kv_fingerprint == other.kv_fingerprint:
        return "nondeterminism"
    close = all(margin is not None and margin < tolerance for margin in margins)
    return "tie" if close else "history"


def _at(values: tuple[T, ...], index: int) -> T | None:
    return values[index] if index < len(values) else None
