"""The contract of a recompute policy: which of the reusable tokens to recompute.

Policies know tensors and spans, never models or files. Indices count the reusable tokens, 0 to N - 1, in
prompt order: prompt tokens with stored KV that lie after the exact prefix. The engine maps them to positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch


@dataclass(frozen=True, slots=True)
class Span:
    """A contiguous range of reusable tokens that belongs together, one document usually."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


Signal = Literal["deviation", "gradual-deviation", "sink-deviation", "query-only", "context", "anchors"]
Layers = Literal["selection", "sink", "last", "critical", "all"]


@dataclass(frozen=True, slots=True)
class Need:
    """A score of every reusable token that the engine computes for a policy, [N], float32.

    Args:
        signal: `deviation`: d_i, for all tokens; `gradual-deviation`: d_i after ever fewer candidates ran
            ever deeper, minus infinity for those that dropped out; `sink-deviation`: d_i of the tokens that
            become attention sinks of the model, minus infinity for all others; `query-only`, `context`,
            `anchors`: attention from a query that saw itself alone, the whole stitched context, or the
            documents' anchors.
        layers: at the selection layer, the model's sink layer, its last, its critical ones (summed), or all
            (summed).
    """

    signal: Signal
    layers: Layers


@dataclass(frozen=True, slots=True)
class SelectionInput:
    """What a policy may look at.

    Args:
        k: how many tokens to select, 0 < k < N.
        spans: the segments, in order, covering 0 to N without overlap.
        scores: what the policy needs, each [N], float32, on the CPU.
    """

    k: int
    spans: Sequence[Span]
    scores: Mapping[Need, torch.Tensor] = field(default_factory=dict)

    def score(self, need: Need) -> torch.Tensor:
        """The score that the engine computed for `need`, [N]."""
        return self.scores[need]

    @property
    def tokens(self) -> int:
        return self.spans[-1].stop if self.spans else 0


class Policy(Protocol):
    """A recompute policy. Implementations are frozen dataclasses with one method to write."""

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
    def needs(self) -> tuple[Need, ...]:
        """The scores that `select` reads; none when it looks at spans alone."""
        ...

    def select(self, given: SelectionInput) -> torch.Tensor:
        """Exactly `given.k` distinct indices, ascending, [k], int64; the same for the same input."""
        ...


def budget(tokens: int, ratio: float) -> int:
    """k = max(1, floor(ratio * N)), 0 when the ratio or N is 0 (Gu et al., 2026, equation 2)."""
    if ratio == 0.0 or tokens == 0:
        return 0
    return max(1, int(ratio * tokens))
