"""`fixed-chunk`: equal spans that cross document boundaries (Gu et al., 2026, section 2.3)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch

from rolling_kv.policies.base import Need, SelectionInput, Span
from rolling_kv.policies.spans import fill_spans, rank_by_mean


@dataclass(frozen=True)
class FixedChunk:
    """Chunks of `length` tokens, the first cut in half, ranked by mean d_i and filled like documents."""

    name: ClassVar[str] = "fixed-chunk"
    reuses: ClassVar[bool] = True
    recomputes: ClassVar[bool] = True
    needs: ClassVar[tuple[Need, ...]] = (Need("deviation", "selection"),)
    length: int = 92

    def select(self, given: SelectionInput) -> torch.Tensor:
        score = given.score(self.needs[0])
        bounds = [0, *range(max(1, self.length // 2), given.tokens, self.length), given.tokens]
        chunks = [Span(start, stop) for start, stop in pairwise(bounds)]
        return fill_spans(rank_by_mean(chunks, score), score=score, k=given.k)
