"""Query probes: how much attention the query pays to each context token, before anything is recomputed.

Three views condition the query's states: nothing but the query itself (FusionRAG), the whole stitched context
(ProphetKV, QCFuse equation 9), or a few anchors of each document at their request positions, the query after
the full context (QCFuse, equations 15 to 17). Scores are always over all context keys, at the layers asked
for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from rolling_kv.engine.host import TransformersHost
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
        layers: whose attention is summed, 0-based.

    Returns:
        [start], float32 (Wang et al., 2026, FusionRAG, with the last layer).
    """
    return _probe(engine, stitched, query_ids, start=start, layers=layers, view=[])


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
        [start], float32 (QCFuse, equation 20).
    """
    return _probe(engine, stitched, query_ids, start=start, layers=layers, view=anchors)


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
        [start], float32 (QCFuse, equation 10, with all layers).
    """
    stop = start + len(query_ids)
    rows = torch.arange(start, stop, device=engine.device)
    positions = torch.arange(stop, device=engine.device)
    mass = torch.zeros(start, dtype=torch.float32, device=engine.device)

    def look(layer: int, query: torch.Tensor, scaling: float, sliding_window: int | None) -> None:
        if layer in layers:
            mass.add_(
                attention_mass(
                    query,
                    stitched.layer(layer)[0][:, :, :stop],
                    rows=rows,
                    positions=positions,
                    context=start,
                    scaling=scaling,
                    sliding_window=sliding_window,
                )
            )

    engine.run(query_ids, rows=rows, stitched=stitched, stop=stop, on_query=look, last_layer=max(layers))
    return mass


def _probe(
    engine: TransformersHost,
    stitched: StitchedKV,
    query_ids: Sequence[int],
    *,
    start: int,
    layers: Collection[int],
    view: Sequence[PlacedKV],
) -> torch.Tensor:
    """The query over a packed view of the context; scores against all of the context's keys."""
    seen = sum(len(part.offsets) for part in view)
    packed = engine.stitch(view, capacity=seen + len(query_ids), packed=True)
    rows = torch.arange(start, start + len(query_ids), device=engine.device)
    positions = torch.arange(start + len(query_ids), device=engine.device)
    mass = torch.zeros(start, dtype=torch.float32, device=engine.device)

    def look(layer: int, query: torch.Tensor, scaling: float, sliding_window: int | None) -> None:
        if layer in layers:
            own = packed.layer(layer)[0][:, :, seen:]
            key = torch.cat((stitched.layer(layer)[0][:, :, :start], own), dim=2)
            mass.add_(
                attention_mass(
                    query,
                    key,
                    rows=rows,
                    positions=positions,
                    context=start,
                    scaling=scaling,
                    sliding_window=sliding_window,
                )
            )

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
