"""A request laid out and ingested outside a session, for measurements that look at every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rolling_kv.call import placed_segments
from rolling_kv.ingest import Ingestor
from rolling_kv.kv import SegmentKV
from rolling_kv.plan import Plan, make_plan
from rolling_kv.store import Lineage, make_lineage
from rolling_kv.store.memory import MemoryStore
from rolling_kv.window import PromptLayout, parse_conditioning
from rolling_kv.workloads import LabelledRequest

if TYPE_CHECKING:
    import torch

    from rolling_kv.engine.host import TransformersHost
    from rolling_kv.engine.stitch import PlacedKV, StitchedKV


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A plan, its KV, and the positions of the labelled tokens."""

    engine: TransformersHost
    plan: Plan
    kv: list[SegmentKV]
    labelled: frozenset[int]

    @property
    def placed(self) -> list[PlacedKV]:
        return placed_segments(self.plan, self.kv)

    def stitched(self) -> StitchedKV:
        return self.engine.stitch(self.placed, capacity=len(self.plan.prompt))

    def recall(self, scores: torch.Tensor, *, budget: float = 0.1) -> float:
        """Recall@10%: the labelled tokens among the tenth of the context with the largest scores.

        Args:
            scores: of every context token, [query_start] (QCFuse, equations 12 and 13).
        """
        from rolling_kv.policies.spans import largest

        chosen = set(largest(scores.cpu(), int(budget * self.plan.query_start)).tolist())
        return len(chosen & self.labelled) / len(self.labelled)

    def document_rank(self, scores: torch.Tensor) -> float:
        """How many documents have a larger mean score than a labelled one, averaged over the labelled ones.

        Args:
            scores: of every context token, [query_start].
        """
        spans = [part.segment for part in self.plan.stored if part.segment.kind == "document"]
        means = [float(scores[span.start : span.stop].double().mean()) for span in spans]
        labelled = [
            mean
            for mean, span in zip(means, spans, strict=True)
            if any(span.start <= position < span.stop for position in self.labelled)
        ]
        return sum(sum(other > mean for other in means) for mean in labelled) / len(labelled)

    def deviations(self) -> torch.Tensor:
        """|K_i(full prefill) - K_i(stored)|^2 of every reusable token and layer, [layers, N], float32."""
        import torch

        engine, plan = self.engine, self.plan
        stored, fresh = self.stitched(), self.stitched()
        rows = torch.arange(plan.prefix, len(plan.prompt), device=engine.device)
        ids = plan.prompt.token_ids
        engine.run(ids[plan.prefix :], rows=rows, stitched=fresh, stop=len(ids))
        reusable = slice(plan.prefix, plan.query_start)
        return torch.stack(
            [
                (fresh.layer(layer)[0] - stored.layer(layer)[0])[0, :, reusable].float().square().sum((0, 2))
                for layer in range(engine.layers)
            ]
        ).cpu()


def lay_out(engine: TransformersHost, request: LabelledRequest, *, conditioning: str) -> LaidOut:
    """Lays out a request and computes the KV of its documents."""
    layout = PromptLayout(engine.tokenizer, instruction=request.instruction)
    documents = [layout.document(text, document_id=str(n)) for n, text in enumerate(request.documents)]
    prompt = layout.prompt(documents, request.query, answer_prefix=request.answer_prefix)

    def lineage_of(path: Sequence[Sequence[int]], *, gap: int = 0) -> Lineage:
        return make_lineage(engine.identity, namespace="profile", path=path, gap=gap)

    plan = make_plan(
        prompt,
        conditioning=parse_conditioning(conditioning),
        lineage_of=lineage_of,
        sliding_window=engine.sliding_window,
    )
    kv, _ = Ingestor(engine=engine, store=MemoryStore()).ensure(plan.stored)
    labels = [(str(span.document), span.start, span.stop) for span in request.spans]
    return LaidOut(engine=engine, plan=plan, kv=kv, labelled=layout.labelled(documents, prompt, labels))
