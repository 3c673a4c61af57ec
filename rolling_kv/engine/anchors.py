"""Anchors: the few tokens of a document that stand for it when a query is probed (QCFuse, section 3.3).

They are found in the document by itself, whatever its stored KV was conditioned on, so that a window that
slides need not find them anew.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from rolling_kv.engine.host import TransformersHost
from rolling_kv.engine.kernels import attention_peak
from rolling_kv.engine.stitch import PlacedKV
from rolling_kv.kv import SegmentKV

AnchorRule = Literal["kvzip", "knorm", "sink"]

ANCHOR_RULES: tuple[AnchorRule, ...] = ("kvzip", "knorm", "sink")

_REPEAT = "\n\nRepeat the previous context exactly:\n"


def anchor_tokens(
    engine: TransformersHost, kv: SegmentKV, *, rule: AnchorRule, ratio: float
) -> tuple[int, ...]:
    """Indices within the segment, ascending: the ceil(ratio * tokens) with the largest score (equation 14).

    Args:
        kv: of the segment, computed after nothing.
        rule: `kvzip`: the most attention that each token gets while the model repeats the segment (Kim et
            al., 2025); `knorm`: the smallest key norms (Devoto et al., 2024); `sink`: the first tokens.
    """
    return best_tokens(anchor_scores(engine, kv, rule=rule), ratio=ratio)


def best_tokens(scores: torch.Tensor, *, ratio: float) -> tuple[int, ...]:
    """Indices, ascending, of the ceil(ratio * tokens) largest of `scores` [tokens], earlier ones first."""
    count = math.ceil(ratio * len(scores))
    best = torch.sort(scores, descending=True, stable=True).indices[:count]
    return tuple(best.sort().values.tolist())


def anchor_scores(engine: TransformersHost, kv: SegmentKV, *, rule: AnchorRule) -> torch.Tensor:
    """How much each token of a segment is worth as an anchor, [tokens], float32, on the CPU."""
    if rule == "sink":
        return -torch.arange(len(kv), dtype=torch.float32)
    if rule == "knorm":
        norms: torch.Tensor = kv.k.float().norm(dim=-1)
        return -norms.mean(dim=(0, 1)).cpu()
    return _reconstruction(engine, kv)


def _reconstruction(engine: TransformersHost, kv: SegmentKV) -> torch.Tensor:
    """Per token the largest attention from a repetition of the segment, averaged over layers."""
    repeat = (*engine.tokenizer.encode(_REPEAT, special=False), *kv.token_ids)
    stop = len(kv) + len(repeat)
    stitched = engine.stitch([PlacedKV(kv=kv, position=0)], capacity=stop)
    positions = torch.arange(stop, device=engine.device)
    rows = positions[len(kv) :]
    peaks = torch.zeros(len(kv), dtype=torch.float32, device=engine.device)

    def look(layer: int, query: torch.Tensor, scaling: float, sliding_window: int | None) -> None:
        peaks.add_(
            attention_peak(
                query,
                stitched.layer(layer)[0],
                rows=rows,
                positions=positions,
                context=len(kv),
                scaling=scaling,
                sliding_window=sliding_window,
            )
        )

    engine.run(
        repeat,
        rows=rows,
        stitched=stitched,
        stop=stop,
        on_query=look,
        last_layer=engine.layers - 1,
    )
    return peaks.cpu() / engine.layers
