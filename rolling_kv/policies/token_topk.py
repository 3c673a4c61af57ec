"""`token-topk`: the tokens that deviate most, one by one (CacheBlend as LMCache implements it)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rolling_kv.policies.base import Need, SelectionInput
from rolling_kv.policies.spans import largest


@dataclass(frozen=True)
class TokenTopK:
    """The k largest d_i, the earlier ones first among equals (Gu et al., 2026, equations 1 and 2)."""

    name: ClassVar[str] = "token-topk"
    reuses: ClassVar[bool] = True
    recomputes: ClassVar[bool] = True
    needs: ClassVar[tuple[Need, ...]] = (Need("deviation", "selection"),)

    def select(self, given: SelectionInput) -> torch.Tensor:
        return largest(given.score(self.needs[0]), given.k)
