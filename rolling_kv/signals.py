"""Signals: the scores that policies need, computed by the engine's passes and probes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rolling_kv.engine.host import TransformersHost
from rolling_kv.engine.probe import probe_anchors, probe_context, probe_query_only
from rolling_kv.engine.stitch import PlacedKV, StitchedKV
from rolling_kv.errors import NumericsError
from rolling_kv.plan import Plan
from rolling_kv.policies.base import Need
from rolling_kv.sampling import estimated, sampled_tokens

# CacheBlend narrows its candidates over the first layers: (candidates a selected token, layers further down).
_GRADUAL = ((4, 1), (2, 2), (1.5, 3))


@dataclass(frozen=True, slots=True)
class Signals:
    """How scores are computed for one call.

    Args:
        selection_layer: where deviations are taken, 0-based.
        deviation_sample: the share of each segment's tokens whose deviation is computed for a policy.
        anchors: gives the anchor tokens of every stored segment, at request positions.
        degraded: takes what could not be done as asked.
    """

    engine: TransformersHost
    plan: Plan
    selection_layer: int
    anchors: Callable[[], Sequence[PlacedKV]]
    degraded: Callable[[str], None]
    deviation_sample: float = 1.0

    def score(self, need: Need, *, stitched: StitchedKV, k: int) -> torch.Tensor:
        """The score of every reusable token, [N], float32, on the CPU.

        Raises:
            NumericsError: a score is not finite.
        """
        score = self._score(need, stitched=stitched, k=k).cpu()
        if bool((score.isnan() | score.isposinf()).any()):
            raise NumericsError(
                f"The model {self.engine.name!r} in {self.engine.identity.dtype} gave scores that are not "
                f"finite ({need.signal}). Open it with dtype='float32' or 'bfloat16'."
            )
        return score

    def deviations(self, stitched: StitchedKV) -> torch.Tensor:
        """d_i of every reusable token at the selection layer, [N], float32."""
        rows = torch.arange(self.plan.prefix, len(self.plan.prompt))
        every = self.engine.deviations(
            stitched, self.plan.prompt.token_ids, rows=rows, layer=self.selection_layer
        )
        return every[torch.tensor(self.plan.reusable_positions, device=every.device) - self.plan.prefix]

    def _score(self, need: Need, *, stitched: StitchedKV, k: int) -> torch.Tensor:
        if need.signal == "deviation":
            return self.deviations(stitched) if self.deviation_sample == 1.0 else self._estimated(stitched)
        if need.signal == "gradual-deviation":
            return self._gradual(stitched, k=k)
        if need.signal == "sink-deviation":
            return self._sinks(stitched)
        start, layers = self.plan.query_start, self._layers(need)
        query_ids = self.plan.prompt.token_ids[start:]
        self._fill_uncached(stitched, last_layer=max(layers))
        if need.signal == "query-only":
            mass = probe_query_only(self.engine, stitched, query_ids, start=start, layers=layers)
        elif need.signal == "context":
            mass = probe_context(self.engine, stitched, query_ids, start=start, layers=layers)
        else:
            anchors = self.anchors()
            mass = probe_anchors(
                self.engine, stitched, query_ids, start=start, layers=layers, anchors=anchors
            )
        return mass.sum(0)[torch.tensor(self.plan.reusable_positions, device=mass.device)]

    def _estimated(self, stitched: StitchedKV) -> torch.Tensor:
        """d_i of a sample of every segment's tokens, and for the others an estimate.

        At layer 1 those of the sample are exact, since layer 0's keys and values are the tokens' own; at a
        deeper selection layer they have seen stored KV of the tokens that are not in the sample.
        """
        lengths = [len(segment.token_ids) for segment in self.plan.reusable]
        sample = sampled_tokens(lengths, self.deviation_sample)
        score = self._deviations_of(sample, stitched=stitched, layer=self.selection_layer)
        return estimated(score[sample], lengths, self.deviation_sample)

    def _fill_uncached(self, stitched: StitchedKV, *, last_layer: int) -> None:
        """Computes documents without stored KV over the stitched context, for a query to find their keys."""
        plan = self.plan
        uncached = [position for position in plan.computed_positions if position < plan.query_start]
        if uncached:
            rows = torch.tensor(uncached, device=self.engine.device)
            ids = [plan.prompt.token_ids[position] for position in uncached]
            self.engine.run(ids, rows=rows, stitched=stitched, stop=plan.query_start, last_layer=last_layer)

    def _layers(self, need: Need) -> tuple[int, ...]:
        if need.layers == "last":
            return (self.engine.layers - 1,)
        if need.layers == "all":
            return tuple(range(self.engine.layers))
        traits = self.engine.traits
        if traits.critical_guessed:
            self.degraded(
                f"The critical layers of {self.engine.name!r} were never measured; the layers "
                f"{', '.join(map(str, traits.critical_layers))} were {traits.critical_source}. Measure them "
                "with `rolling-kv profile`."
            )
        return traits.critical_layers

    def _gradual(self, stitched: StitchedKV, *, k: int) -> torch.Tensor:
        """Deviations of ever fewer candidates at ever deeper layers; -inf for those that dropped out.

        Uncached tokens run along at every stage, as they do when the selection is recomputed (Yao et al.,
        2025, section 4.3, with the first stage over all tokens).
        """
        tokens = self.plan.reusable_tokens
        candidates = torch.arange(tokens)
        score = self.deviations(stitched).cpu()
        for share, further in _GRADUAL:
            layer = self.selection_layer + further
            if layer >= self.engine.layers:
                break
            keep = min(len(candidates), int(share * k))
            order = torch.sort(score[candidates], descending=True, stable=True).indices[:keep]
            candidates = candidates[order].sort().values
            score = self._deviations_of(candidates, stitched=stitched, layer=layer)
        return score

    def _sinks(self, stitched: StitchedKV) -> torch.Tensor:
        """d_i at the sink layer of the tokens that become sinks, -inf for all others."""
        traits = self.engine.traits
        if traits.sink_layer is None:
            self.degraded(
                f"No sink tokens of {self.engine.name!r} are known ({traits.sink_source}), so none were "
                "repaired and the whole budget went to the wrapped policy."
            )
            return torch.full((self.plan.reusable_tokens,), float("-inf"))
        ids = self.plan.prompt.token_ids
        candidates = [
            index
            for index, position in enumerate(self.plan.reusable_positions)
            if ids[position] in traits.sink_token_ids
        ]
        return self._deviations_of(torch.tensor(candidates), stitched=stitched, layer=traits.sink_layer)

    def _deviations_of(self, candidates: torch.Tensor, *, stitched: StitchedKV, layer: int) -> torch.Tensor:
        """d_i of the `candidates` (ascending), which run with the uncached tokens; -inf for others."""
        plan = self.plan
        wanted = torch.tensor(plan.reusable_positions)[candidates.long()]
        rows = torch.cat((wanted, torch.tensor(plan.computed_positions))).sort().values
        deviation = self.engine.deviations(stitched, plan.prompt.token_ids, rows=rows, layer=layer).cpu()
        score = torch.full((plan.reusable_tokens,), float("-inf"))
        score[candidates.long()] = deviation[torch.isin(rows, wanted)]
        return score
