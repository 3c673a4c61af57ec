"""Signals: the scores that policies need, computed by the engine's passes and probes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rolling_kv.engine.host import TransformersHost
from rolling_kv.engine.probe import probe_anchors, probe_context, probe_query_only
from rolling_kv.engine.stitch import PlacedKV, StitchedKV
from rolling_kv.plan import Plan
from rolling_kv.policies.base import Need

# CacheBlend narrows its candidates over the first layers: (candidates a selected token, layer they run to).
_GRADUAL = ((4, 1), (2, 2), (1.5, 3))


@dataclass(frozen=True, slots=True)
class Signals:
    """How scores are computed for one call.

    Args:
        selection_layer: where deviations are taken, 0-based.
        critical_layers: whose attention localises, 0-based.
        anchors: the anchor tokens of every stored segment, when the policy needs them, at request positions.
    """

    selection_layer: int
    critical_layers: tuple[int, ...]
    anchors: Sequence[PlacedKV] = ()

    def score(
        self, need: Need, plan: Plan, *, engine: TransformersHost, stitched: StitchedKV, k: int
    ) -> torch.Tensor:
        """The score of every reusable token, [N], float32."""
        if need.signal == "deviation":
            rows = torch.arange(plan.prefix, len(plan.prompt))
            every = engine.deviations(stitched, plan.prompt.token_ids, rows=rows, layer=self.selection_layer)
            return every[: plan.reusable_tokens]
        if need.signal == "gradual-deviation":
            return self._gradual(plan, engine=engine, stitched=stitched, k=k)
        start = plan.query_start
        query_ids = plan.prompt.token_ids[start:]
        layers = self._layers(need, engine)
        if need.signal == "query-only":
            mass = probe_query_only(engine, stitched, query_ids, start=start, layers=layers)
        elif need.signal == "context":
            mass = probe_context(engine, stitched, query_ids, start=start, layers=layers)
        else:
            mass = probe_anchors(
                engine, stitched, query_ids, start=start, layers=layers, anchors=self.anchors
            )
        return mass[plan.prefix :]

    def _layers(self, need: Need, engine: TransformersHost) -> tuple[int, ...]:
        if need.layers == "last":
            return (engine.layers - 1,)
        return tuple(range(engine.layers)) if need.layers == "all" else self.critical_layers

    def _gradual(self, plan: Plan, *, engine: TransformersHost, stitched: StitchedKV, k: int) -> torch.Tensor:
        """Deviations of ever fewer candidates at ever deeper layers; -inf for those that dropped out.

        The query runs along at every stage, as it does when the selection is recomputed (Yao et al., 2025,
        section 4.3, with the first stage over all tokens).
        """
        tokens = plan.reusable_tokens
        query = torch.arange(plan.query_start, len(plan.prompt))
        candidates = torch.arange(tokens)
        stages = [(float("inf"), self.selection_layer)]
        stages += [(share, self.selection_layer + layer) for share, layer in _GRADUAL]
        score = torch.full((tokens,), float("-inf"))
        for share, layer in stages:
            keep = min(len(candidates), tokens if share == float("inf") else int(share * k))
            if keep < len(candidates):
                order = torch.sort(score[candidates], descending=True, stable=True).indices[:keep]
                candidates = candidates[order].sort().values
            rows = torch.cat((candidates + plan.prefix, query))
            deviation = engine.deviations(
                stitched, plan.prompt.token_ids, rows=rows, layer=min(layer, engine.layers - 1)
            )
            score = torch.full((tokens,), float("-inf"))
            score[candidates] = deviation[: len(candidates)].cpu()
        return score
