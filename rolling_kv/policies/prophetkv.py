"""`prophetkv`: the query over the whole stitched context (QCFuse, section 2.2.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rolling_kv.policies.base import Need, SelectionInput
from rolling_kv.policies.spans import largest


@dataclass(frozen=True)
class ProphetKV:
    """The k tokens with the largest attention mass over all layers (QCFuse, equations 10 and 11)."""

    name: ClassVar[str] = "prophetkv"
    reuses: ClassVar[bool] = True
    recomputes: ClassVar[bool] = True
    needs: ClassVar[tuple[Need, ...]] = (Need("context", "all"),)

    def select(self, given: SelectionInput) -> torch.Tensor:
        return largest(given.score(self.needs[0]), given.k)
