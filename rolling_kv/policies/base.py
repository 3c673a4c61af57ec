"""The contract of a recompute policy: which of the reusable tokens to recompute.

Policies know tensors and spans, never models or files. Indices count the reusable tokens, 0 to N - 1, in
prompt
order: prompt tokens with stored KV that lie after the exact prefix. The engine maps them to positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class Span:
    """A contiguous range of reusable tokens that belongs together, one document usually."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class SelectionInput:
    """What a policy may look at.

    Args:
        k: how many tokens to select, 0 < k < N.
        spans: the segments, in order, covering 0 to N without overlap.
        deviation: d_i of every reusable token, [N], float32; None unless the policy needs it.
    """

    k: int
    spans: Sequence[Span]
    deviation: torch.Tensor | None

    @property
    def tokens(self) -> int:
        return self.spans[-1].stop if self.spans else 0

    def require_deviation(self) -> torch.Tensor:
        assert self.deviation is not None, "the engine computes deviations for a policy that needs them"
        return self.deviation


class Policy(Protocol):
    """A recompute policy. Implementations are frozen dataclasses with one method."""

    @property
    def name(self) -> str:
        """The name in the registry."""
        ...

    @property
    def reuses(self) -> bool:
        """False when nothing that is stored is used (full prefill)."""
        ...

    @property
    def recomputes(self) -> bool:
        """False when the selection is always empty (direct reuse)."""
        ...

    @property
    def needs_deviation(self) -> bool:
        """Whether `select` reads the deviations, which cost the layers up to the selection layer."""
        ...

    def select(self, given: SelectionInput) -> torch.Tensor:
        """Exactly `given.k` distinct indices, ascending, [k], int64; the same for the same input."""
        ...


def budget(tokens: int, ratio: float) -> int:
    """k = max(1, floor(ratio * N)), 0 when the ratio or N is 0 (Gu et al., 2026, equation 2)."""
    if ratio == 0.0 or tokens == 0:
        return 0
    return max(1, int(ratio * tokens))
