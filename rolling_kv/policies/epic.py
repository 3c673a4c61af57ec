"""`epic`: the beginnings of all documents (EPIC's LegoLink; QCFuse, section 2.2.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rolling_kv.policies.base import Need, SelectionInput


@dataclass(frozen=True)
class Epic:
    """The first tokens of every segment, the budget spread evenly, earlier segments first with the rest."""

    name: ClassVar[str] = "epic"
    reuses: ClassVar[bool] = True
    recomputes: ClassVar[bool] = True
    needs: ClassVar[tuple[Need, ...]] = ()

    def select(self, given: SelectionInput) -> torch.Tensor:
        by_depth = sorted(
            (index - span.start, index) for span in given.spans for index in range(span.start, span.stop)
        )
        return torch.tensor(sorted(index for _, index in by_depth[: given.k]))
