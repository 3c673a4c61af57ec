"""`direct-reuse`: stored KV is used as it is (QCFuse, section 2.1.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rolling_kv.policies.base import Need, SelectionInput


@dataclass(frozen=True)
class DirectReuse:
    """Recomputes nothing, whatever the ratio."""

    name: ClassVar[str] = "direct-reuse"
    reuses: ClassVar[bool] = True
    recomputes: ClassVar[bool] = False
    needs: ClassVar[tuple[Need, ...]] = ()

    def select(self, given: SelectionInput) -> torch.Tensor:
        return torch.empty(0, dtype=torch.int64)
