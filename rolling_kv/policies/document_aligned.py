"""`document-aligned`: whole documents by their mean deviation, then one window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rolling_kv.policies.base import Need, SelectionInput
from rolling_kv.policies.spans import fill_spans, rank_by_mean


@dataclass(frozen=True)
class DocumentAligned:
    """Segments ranked by mean d_i, filled while they fit, the rest a window in the next (equation 3)."""

    name: ClassVar[str] = "document-aligned"
    reuses: ClassVar[bool] = True
    recomputes: ClassVar[bool] = True
    needs: ClassVar[tuple[Need, ...]] = (Need("deviation", "selection"),)

    def select(self, given: SelectionInput) -> torch.Tensor:
        score = given.score(self.needs[0])
        return fill_spans(rank_by_mean(given.spans, score), score=score, k=given.k)
