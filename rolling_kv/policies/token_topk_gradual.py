"""`token-topk-gradual`: candidates narrowed down layer by layer (CacheBlend as its own paper has it)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rolling_kv.policies.base import Need, SelectionInput
from rolling_kv.policies.spans import largest


@dataclass(frozen=True)
class TokenTopKGradual:
    """The k largest d_i of the candidates that are left (Yao et al., 2025, section 4.3)."""

    name: ClassVar[str] = "token-topk-gradual"
    reuses: ClassVar[bool] = True
    recomputes: ClassVar[bool] = True
    needs: ClassVar[tuple[Need, ...]] = (Need("gradual-deviation", "selection"),)

    def select(self, given: SelectionInput) -> torch.Tensor:
        return largest(given.score(self.needs[0]), given.k)
