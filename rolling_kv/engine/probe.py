"""Query probes: how much attention the query pays to each context token, before anything is recomputed.

Three views condition the query's states: nothing but the query itself (FusionRAG), the whole stitched context
(ProphetKV, QCFuse equation 9), or a few anchors of each document at their request positions, the query after
the full context (QCFuse, equations 15 to 17). Scores are always over all context keys, at the layers asked
for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from rolling_kv.engine.host import TransformersHost
from rolling_kv.engine.interception import OnQuery
from rolling_kv.engine.kernels import attention_mass
from rolling_kv.engine.stitch import PlacedKV, StitchedKV


def probe_query_only(
    engine: TransformersHost,
    stitched: StitchedKV,
    query_ids: Sequence[int],
    *,
    start: int,
    layers: Collection[int],
) -> torch.Tensor:
    """The query sees itself alone, at its positions from `start` on.

    Args:
        stitched: the context's KV; its slots before `start` are scored and stay as they are.
        layers: whose attention is measured, 0-based.

    Returns:
        [layers, start], float32, in ascending order of layers (Wang et al., 2026, FusionRAG, with the last).
    """
    return probe_anchors(engine, stitched, query_ids, start=start, layers=layers, anchors=[])


def probe_anchors(
    engine: TransformersHost,
    stitched: StitchedKV,
    query_ids: Sequence[int],
    *,
    start: int,
    layers: Collection[int],
    anchors: Sequence[PlacedKV],
) -> torch.Tensor:
    """The query sees the anchors and itself, no deeper than the deepest of `layers`.

    Args:
        anchors: the anchor tokens of each segment, at their request positions, ascending.

    Returns:
        [layers, start], float32, in ascending order of layers (QCFuse, equation 18).
    """
    seen = sum(len(part.offsets) for part in anchors)
    packed = engine.stitch(anchors, capacity=seen + len(query_ids), packed=True)
    rows = torch.arange(start, start + len(query_ids), device=engine.device)

    def keys(layer: int) -> torch.Tensor:
        own = packed.layer(layer)[0][:, :, seen:]
        return torch.cat((stitched.layer(layer)[0][:, :, :start], own), dim=2)

    mass, look = _listener(engine, keys, rows=rows, start=start, layers=layers)
    engine.run(
        query_ids,
        rows=rows,
        stitched=packed,
        stop=packed.capacity,
        slots=torch.arange(seen, packed.capacity, device=engine.device),
        positions=torch.cat((packed.positions, rows)),
        on_query=look,
        last_layer=max(layers),
    )
    return mass


def probe_context(
    engine: TransformersHost,
    stitched: StitchedKV,
    query_ids: Sequence[int],
    *,
    start: int,
    layers: Collection[int],
) -> torch.Tensor:
    """The query sees the whole stitched context; its own slots are written, the context's are not.

    Returns:
        [layers, start], float32, in ascending order of layers (QCFuse, equation 10 before the sum).
    """
    stop = start + len(query_ids)
    rows = torch.arange(start, stop, device=engine.device)

    def keys(layer: int) -> torch.Tensor:
        return stitched.layer(layer)[0][:, :, :stop]

    mass, look = _listener(engine, keys, rows=rows, start=start, layers=layers)
    engine.run(query_ids, rows=rows, stitched=stitched, stop=stop, on_query=look, last_layer=max(layers))
    return mass


def _listener(
    engine: TransformersHost,
    keys: Callable[[int], torch.Tensor],
    *,
    rows: torch.Tensor,
    start: int,
    layers: Collection[int],
) -> tuple[torch.Tensor, OnQuery]:
    """The masses, [layers, start], and the listener that fills them as a pass goes by.

    Args:
        keys: of a layer, [1, kv_heads, start + query, head_dim]: the context's, then the query's.
    """
    ordered = sorted(layers)
    mass = torch.zeros(len(ordered), start, dtype=torch.float32, device=engine.device)
    positions = torch.arange(start + len(rows), device=engine.device)

    def look(layer: int, query: torch.Tensor, scaling: float, sliding_window: int | None) -> None:
        if layer in ordered:
            mass[ordered.index(layer)] = attention_mass(
                query,
                keys(layer),
                rows=rows,
                positions=positions,
                context=start,
                scaling=scaling,
                sliding_window=sliding_window,
            )

    return mass, look
