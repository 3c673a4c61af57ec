"""Rows as a replay gives them, made from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rolling_kv.replay.rows import ReferenceRow, ReplayRow

LAYERS = 4
ORDERS = ("chronological", "reversed", "random:0", "random:1", "random:2")
SEGMENTS = ("instruction", "obs-1", "obs-2", "obs-3", "query")


def reference(request: int, **changed: Any) -> ReferenceRow:
    values: dict[str, Any] = {
        "request": request,
        "prompt_digest": f"prompt-{request}",
        "prompt_tokens": 900 + request,
        "segments": SEGMENTS,
        "query": f"What was the close on day {request}?",
        "token_ids": (10, 11, 12),
        "text": "170.12",
        "margins": (2.0, 1.5, 1.0, 4.0),
        "right": True,
        "ttft": 1.0,
    }
    return ReferenceRow(**(values | changed))


def row(arm: str, order: str, request: int, **changed: Any) -> ReplayRow:
    values: dict[str, Any] = {
        "arm": arm,
        "order": order,
        "position": request,
        "request": request,
        "prompt_digest": f"prompt-{request}",
        "token_ids": (10, 11, 12),
        "text": "170.12",
        "margins": (2.0, 1.5, 1.0, 4.0),
        "logits_fingerprint": "aa",
        "kv_fingerprint": grid(0),
        "lineages": ("one", "two"),
        "top1": 1.0,
        "kl": 0.01,
        "segments": 3,
        "k": 40,
        "captured_deviation": 0.5,
        "prefix": 100,
        "reused": 700,
        "recomputed": 40,
        "computed": 60,
        "ttft": 0.25,
        "degraded": (),
    }
    return ReplayRow(**(values | changed))


def grid(value: int, *places: tuple[int, int]) -> str:
    """A `kv_fingerprint` of zeros, with `value` at the given (layer, segment)."""
    hashes = np.zeros((LAYERS, len(SEGMENTS)), dtype="<u4")
    for layer, segment in places:
        hashes[layer, segment] = value
    return hashes.tobytes().hex()


@dataclass
class Synthetic:
    """A replay whose arms depend on history as much as they are told.

    Args:
        arms: name to how likely an order changes an answer, and how far the arm is from full prefill.
    """

    requests: int = 30
    seed: int = 0
    orders: tuple[str, ...] = ORDERS
    arms: dict[str, tuple[float, float]] = field(
        default_factory=lambda: {
            "token-topk:first-seen": (0.45, 0.1),
            "document-aligned:first-seen": (0.15, 0.1),
            "document-aligned:window:3": (0.0, 0.06),
            "full-prefill": (0.0, 0.0),
        }
    )

    def rows(self) -> tuple[list[ReferenceRow], list[ReplayRow]]:
        rng = random.Random(self.seed)
        references = [
            reference(
                request,
                text=f"open {rng.uniform(90, 200):.2f} close {rng.uniform(90, 200):.2f}",
                token_ids=(10, 11, 12, request),
                margins=(3.0, 2.0, 1.0, 2.0, 5.0),
                right=rng.random() < 0.8,
                ttft=rng.uniform(2.3, 2.6),
            )
            for request in range(self.requests)
        ]
        rows = []
        for arm, (history, distance) in self.arms.items():
            wrong = {one.request: rng.random() < distance for one in references}
            for order in (*self.orders, "repeat", "reset"):
                depends = history if order not in ("chronological", "repeat", "reset") else 0.0
                rows += [
                    self._row(rng, arm, order, one, changed=rng.random() < depends, wrong=wrong[one.request])
                    for one in references
                ]
        return references, rows

    def _row(
        self, rng: random.Random, arm: str, order: str, one: ReferenceRow, *, changed: bool, wrong: bool
    ) -> ReplayRow:
        full = arm == "full-prefill"
        token_ids, text, margins, kv = one.token_ids, one.text, one.margins, grid(0)
        if wrong:
            token_ids, text = (10, 11, 99), one.text.replace("open", "close")
        if changed:
            other = rng.randint(1, 3)
            token_ids, text = (10, 20 + other, 12), f"open {other}00.00 <b>close</b> & {one.text}"
            margins = (3.0, rng.choice([0.4, 1.2, 0.0002]), 1.0, 2.0)
            kv = grid(other, (rng.randint(0, 1), rng.randint(1, 3)), (3, 4))
        return row(
            arm,
            order,
            one.request,
            token_ids=token_ids,
            text=text,
            margins=margins,
            logits_fingerprint="aa" if not changed else f"{token_ids[1]}",
            kv_fingerprint="" if full else kv,
            top1=1.0 if not (wrong or changed) else 0.7,
            kl=0.0 if full else rng.uniform(0, 0.02) + 0.3 * (wrong or changed),
            segments=1 if full else (180 if "topk" in arm else 4) + rng.randint(0, 9),
            captured_deviation=None if full else (0.98 if "topk" in arm else 0.07),
            ttft=one.ttft * rng.uniform(0.97, 1.03)
            if full
            else rng.gauss(0.42, 0.02) + 0.08 * (rng.random() < 0.06),
        )
