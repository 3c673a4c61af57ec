"""Which layers and anchors localise labelled answers: QCFuse's figures 6, 7 and 8."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rolling_kv.bench.laid_out import LaidOut

if TYPE_CHECKING:
    import torch

ANCHOR_RATIOS = (0.02, 0.05, 0.1, 0.2, 0.4)
DEFAULT_ANCHORS = ("kvzip", 0.1)


@dataclass(slots=True)
class Localisation:
    """Recall@10% of labelled tokens, gathered over requests (QCFuse, sections 3.2.3 to 3.4).

    Args:
        masses: of each request the attention of the anchor-conditioned query, [layers, context].
        anchors, context: recalls, one a request.
    """

    layers: int
    laid_out: list[LaidOut] = field(default_factory=list)
    masses: list[torch.Tensor] = field(default_factory=list)
    anchors: dict[tuple[str, float], list[float]] = field(default_factory=dict)
    context: list[float] = field(default_factory=list)

    def add(self, request: LaidOut) -> None:
        """Measures one request, isolated: every layer, every anchor rule and ratio, and the whole context."""
        from rolling_kv.engine.anchors import ANCHOR_RULES, anchor_scores
        from rolling_kv.engine.probe import probe_context

        engine, plan = request.engine, request.plan
        stitched = request.stitched()
        start, query = plan.query_start, plan.prompt.token_ids[plan.query_start :]
        whole = probe_context(engine, stitched, query, start=start, layers=range(self.layers))
        self.context.append(request.recall(whole.sum(0)))
        for rule in ANCHOR_RULES:
            scores = [anchor_scores(engine, kv, rule=rule) for kv in request.kv]
            for ratio in ANCHOR_RATIOS:
                mass = _anchored(request, stitched, scores, ratio=ratio)
                self.anchors.setdefault((rule, ratio), []).append(request.recall(mass.sum(0)))
                if (rule, ratio) == DEFAULT_ANCHORS:
                    self.masses.append(mass)
        self.laid_out.append(request)

    def recall(self, layers: list[int]) -> float:
        """Mean Recall@10% of the summed attention of some layers (equation 20)."""
        return fmean(
            request.recall(mass[layers].sum(0))
            for request, mass in zip(self.laid_out, self.masses, strict=True)
        )

    def document_rank(self, layer: int) -> float:
        """How many documents have a larger mean attention at `layer` than a labelled one, on average."""
        return fmean(
            request.document_rank(mass[layer])
            for request, mass in zip(self.laid_out, self.masses, strict=True)
        )

    def report(self, *, most: int = 8) -> dict[str, Any]:
        """The single-layer curve, the top-k curve up to `most` layers, and the anchor sweep.

        Layers are ranked by recall, equal ones by the rank of the labelled documents.
        """
        single = [self.recall([layer]) for layer in range(self.layers)]
        ranks = [self.document_rank(layer) for layer in range(self.layers)]
        ranked = sorted(range(self.layers), key=lambda layer: (-single[layer], ranks[layer], layer))
        return {
            "single_layer": [
                {"layer": layer, "recall": single[layer], "document_rank": ranks[layer]}
                for layer in range(self.layers)
            ],
            "ranked_layers": ranked,
            "top_k": [
                {"k": k, "layers": ranked[:k], "recall": self.recall(ranked[:k])}
                for k in range(1, min(most, self.layers) + 1)
            ],
            "all_layers": self.recall(list(range(self.layers))),
            "whole_context": fmean(self.context),
            "anchors": [
                {"rule": rule, "ratio": ratio, "recall": fmean(recalls)}
                for (rule, ratio), recalls in self.anchors.items()
            ],
        }


def _anchored(request: LaidOut, stitched: Any, scores: list[torch.Tensor], *, ratio: float) -> torch.Tensor:
    import torch

    from rolling_kv.engine.anchors import best_tokens
    from rolling_kv.engine.probe import probe_anchors
    from rolling_kv.engine.stitch import PlacedKV

    engine, plan = request.engine, request.plan
    anchors = [
        PlacedKV(kv=part.kv, position=part.position, tokens=torch.tensor(best_tokens(one, ratio=ratio)))
        for part, one in zip(request.placed, scores, strict=True)
    ]
    start = plan.query_start
    query = plan.prompt.token_ids[start:]
    return probe_anchors(
        engine, stitched, query, start=start, layers=range(engine.layers), anchors=anchors
    ).cpu()
