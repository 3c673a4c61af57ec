"""`full-prefill`: nothing is reused; the baseline, and the reference for answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rolling_kv.policies.base import Need, SelectionInput


@dataclass(frozen=True)
class FullPrefill:
    """Computes every token by the model's stock forward."""

    name: ClassVar[str] = "full-prefill"
    reuses: ClassVar[bool] = False
    recomputes: ClassVar[bool] = True
    needs: ClassVar[tuple[Need, ...]] = ()

    def select(self, given: SelectionInput) -> torch.Tensor:
        return torch.arange(given.tokens)
