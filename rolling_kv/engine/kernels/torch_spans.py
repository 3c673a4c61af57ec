"""Sums of a score over spans: the torch reference."""

from __future__ import annotations

import torch


def span_sums(score: torch.Tensor, starts: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
    """The sum of `score` from each start up to its stop, exclusive; spans may overlap or be empty.

    Args:
        score: [tokens], finite.
        starts, stops: [spans], integers from 0 to tokens.

    Returns:
        [spans], float64: sums of float32 scores, exact enough that spans rank the same on every device.
    """
    # every span summed on its own: differences of running totals lose what is small beside a huge score
    exact = score.double()
    sums = [
        float(exact[start:stop].sum()) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
    ]
    return torch.tensor(sums, dtype=torch.float64, device=score.device)
