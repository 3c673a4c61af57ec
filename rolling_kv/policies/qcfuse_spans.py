"""`qcfuse-spans`: QCFuse's scores, spent on contiguous documents. Neither paper has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rolling_kv.policies.base import Need, SelectionInput
from rolling_kv.policies.spans import fill_spans, rank_by_mean


@dataclass(frozen=True)
class QCFuseSpans:
    """Segments ranked by their mean QCFuse score and filled like `document-aligned`."""

    name: ClassVar[str] = "qcfuse-spans"
    reuses: ClassVar[bool] = True
    recomputes: ClassVar[bool] = True
    needs: ClassVar[tuple[Need, ...]] = (Need("anchors", "critical"),)

    def select(self, given: SelectionInput) -> torch.Tensor:
        score = given.score(self.needs[0])
        return fill_spans(rank_by_mean(given.spans, score), score=score, k=given.k)
