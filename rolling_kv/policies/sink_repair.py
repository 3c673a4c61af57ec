"""`sink-repair`: attention sinks first, the rest of the budget to another policy. Neither paper has it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from rolling_kv.policies.base import Need, Policy, SelectionInput, Span
from rolling_kv.policies.document_aligned import DocumentAligned
from rolling_kv.policies.spans import largest

_SINKS = Need("sink-deviation", "sink")


@dataclass(frozen=True)
class SinkRepair:
    """The sinks that deviate most take at most `share` of the budget, `inner` selects among all other tokens.

    In a full prefill a few tokens of a window become attention sinks that their stored KV does not know of.
    They are invisible at a shallow selection layer, and every answer hangs on them.

    Args:
        inner: spends what is left of k.
        share: of k, rounded up, at most for sinks.
    """

    inner: Policy = field(default_factory=DocumentAligned)
    share: float = 0.2

    @property
    def name(self) -> str:
        return f"sink-repair:{self.inner.name}"

    @property
    def reuses(self) -> bool:
        return True

    @property
    def recomputes(self) -> bool:
        return True

    @property
    def needs(self) -> tuple[Need, ...]:
        return (*self.inner.needs, _SINKS)

    def select(self, given: SelectionInput) -> torch.Tensor:
        score = given.score(_SINKS)
        count = min(math.ceil(self.share * given.k), int((score > float("-inf")).sum()))
        sinks = largest(score, count)
        if count == given.k:
            return sinks
        kept = torch.ones(given.tokens, dtype=torch.bool)
        kept[sinks] = False
        others = kept.nonzero()[:, 0]
        rest = self.inner.select(_without(given, kept, k=given.k - count))
        return torch.cat((sinks, others[rest])).sort().values


def _without(given: SelectionInput, kept: torch.Tensor, *, k: int) -> SelectionInput:
    """The same choice among the `kept` tokens [N], counted anew."""
    before = [0, *kept.cumsum(0).tolist()]
    spans = [Span(before[span.start], before[span.stop]) for span in given.spans]
    return SelectionInput(
        k=k,
        spans=[span for span in spans if len(span)],
        scores={need: score[kept] for need, score in given.scores.items()},
    )
