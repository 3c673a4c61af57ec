"""`qcfuse`: the query over the documents' anchors, judged by the critical layers (QCFuse, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rolling_kv.policies.base import Need, SelectionInput
from rolling_kv.policies.spans import largest


@dataclass(frozen=True)
class QCFuse:
    """The k tokens with the largest attention mass over the critical layers (QCFuse, equation 20)."""

    name: ClassVar[str] = "qcfuse"
    reuses: ClassVar[bool] = True
    recomputes: ClassVar[bool] = True
    needs: ClassVar[tuple[Need, ...]] = (Need("anchors", "critical"),)

    def select(self, given: SelectionInput) -> torch.Tensor:
        return largest(given.score(self.needs[0]), given.k)
