"""`fusionrag`: the query alone, judged by the last layer (QCFuse, section 2.2.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rolling_kv.policies.base import Need, SelectionInput
from rolling_kv.policies.spans import largest


@dataclass(frozen=True)
class FusionRAG:
    """The k tokens that a query which saw nothing else attends to most, at the last layer."""

    name: ClassVar[str] = "fusionrag"
    reuses: ClassVar[bool] = True
    recomputes: ClassVar[bool] = True
    needs: ClassVar[tuple[Need, ...]] = (Need("query-only", "last"),)

    def select(self, given: SelectionInput) -> torch.Tensor:
        return largest(given.score(self.needs[0]), given.k)
