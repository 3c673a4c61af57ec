"""Deviations of a sample: which tokens of every segment are looked at, and what is made of the others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch


def sampled_tokens(lengths: Sequence[int], share: float) -> torch.Tensor:
    """Tokens that are looked at: of each segment ceil(share * length), evenly spread.

    Args:
        lengths: tokens of each segment; they stand one behind the other.
        share: above 0, to 1.

    Returns:
        Ascending indices, int64.
    """
    parts = [_spread(length, share) + start for start, length in _segments(lengths)]
    return torch.cat([torch.arange(0), *parts])


def estimated(sampled: torch.Tensor, lengths: Sequence[int], share: float) -> torch.Tensor:
    """Scores of all tokens: each that of the nearest sampled token of its segment, of two the earlier.

    Args:
        sampled: the scores of `sampled_tokens(lengths, share)`.

    Returns:
        [tokens], as `sampled`.
    """
    nearest, before = [torch.arange(0)], 0
    for _, length in _segments(lengths):
        tokens = _spread(length, share)
        distance = (torch.arange(length)[:, None] - tokens).abs()
        nearest.append(distance.argmin(dim=1) + before)
        before += len(tokens)
    return sampled[torch.cat(nearest)]


def _spread(length: int, share: float) -> torch.Tensor:
    """The middles of ceil(share * length) equal parts of a segment."""
    count = math.ceil(share * length)
    return (2 * torch.arange(count) + 1) * length // (2 * max(count, 1))


def _segments(lengths: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Start and length of each segment."""
    start = 0
    for length in lengths:
        yield start, length
        start += length
