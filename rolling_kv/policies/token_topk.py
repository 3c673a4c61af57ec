"""`token-topk`: the tokens that deviate most, one by one (CacheBlend as LMCache implements it)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rolling_kv.policies.base import SelectionInput


@dataclass(frozen=True)
class TokenTopK:
    """The k largest d_i, the earlier ones first among equals (Gu et al., 2026, equations 1 and 2)."""

    name: ClassVar[str] = "token-topk"
    reuses: ClassVar[bool] = True
    recomputes: ClassVar[bool] = True
    needs_deviation: ClassVar[bool] = True

    def select(self, given: SelectionInput) -> torch.Tensor:
        order = torch.sort(given.require_deviation(), descending=True, stable=True).indices
        return order[: given.k].sort().values.cpu()
