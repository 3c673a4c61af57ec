"""`random-document`: document spans in a random order that never changes (Gu et al., 2026, section 2.3)."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

import torch

from rolling_kv.policies.base import Need, SelectionInput
from rolling_kv.policies.spans import fill_spans


@dataclass(frozen=True)
class RandomDocument:
    """Segments in the order of `seed`, filled like documents; one that is cut keeps its beginning."""

    name: ClassVar[str] = "random-document"
    reuses: ClassVar[bool] = True
    recomputes: ClassVar[bool] = True
    needs: ClassVar[tuple[Need, ...]] = ()
    seed: int = 0

    def select(self, given: SelectionInput) -> torch.Tensor:
        shuffled = list(given.spans)
        random.Random(self.seed).shuffle(shuffled)
        return fill_spans(shuffled, score=torch.zeros(given.tokens), k=given.k)
