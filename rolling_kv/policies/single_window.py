"""`single-window`: one contiguous run (Gu et al., 2026, section 2.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rolling_kv.policies.base import Need, SelectionInput
from rolling_kv.policies.spans import best_window


@dataclass(frozen=True)
class SingleWindow:
    """The k-token window with the largest total d_i, the earliest among equals."""

    name: ClassVar[str] = "single-window"
    reuses: ClassVar[bool] = True
    recomputes: ClassVar[bool] = True
    needs: ClassVar[tuple[Need, ...]] = (Need("deviation", "selection"),)

    def select(self, given: SelectionInput) -> torch.Tensor:
        start = best_window(given.score(self.needs[0]), given.k)
        return torch.arange(start, start + given.k)
