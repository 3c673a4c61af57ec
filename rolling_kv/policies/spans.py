"""Spending a budget on tokens or spans: the rules that policies share."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rolling_kv.engine.kernels import span_sums
from rolling_kv.policies.base import Span


def fill_spans(ranked: Iterable[Span], *, score: torch.Tensor, k: int) -> torch.Tensor:
    """Whole spans, best first, while the next one fits; then the best window inside the first that does not.

    Args:
        ranked: spans, best first, together at least k tokens long.
        score: [N]; the window with the largest sum is taken, the earliest of equal ones.
        k: how many indices.

    Returns:
        [k], int64, ascending (Gu et al., 2026, section 2.3).
    """
    chosen: list[torch.Tensor] = []
    left = k
    for span in ranked:
        if left == 0:
            break
        if len(span) <= left:
            chosen.append(torch.arange(span.start, span.stop))
            left -= len(span)
            continue
        start = span.start + best_window(score[span.start : span.stop], left)
        chosen.append(torch.arange(start, start + left))
        left = 0
    assert left == 0, "the spans hold at least k tokens"
    return torch.cat(chosen).sort().values


def rank_by_mean(spans: Iterable[Span], score: torch.Tensor) -> list[Span]:
    """Spans by their mean score, largest first, earlier ones first among equals (equation 3)."""
    filled = [span for span in spans if len(span)]
    starts = torch.tensor([span.start for span in filled], dtype=torch.int64, device=score.device)
    stops = torch.tensor([span.stop for span in filled], dtype=torch.int64, device=score.device)
    means = (span_sums(score, starts, stops) / (stops - starts)).tolist()
    ranked = sorted(zip(means, filled, strict=True), key=lambda pair: (-pair[0], pair[1].start))
    return [span for _, span in ranked]


def best_window(score: torch.Tensor, length: int) -> int:
    """Where the window of `length` with the largest sum starts, the earliest of equal ones."""
    # every window summed on its own: differences of running totals lose what is small beside a huge score
    sums = score.double().cpu().unfold(0, length, 1).sum(-1)
    return int((sums == sums.max()).nonzero()[0])


def largest(score: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest scores, the earlier ones first among equals; [k], int64, ascending."""
    return torch.sort(score, descending=True, stable=True).indices[:k].sort().values
