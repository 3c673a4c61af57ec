"""Sums of a score over spans on a GPU, one program a span."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rolling_kv.engine.kernels.triton_launch import launch

_BLOCK = 256


def span_sums(score: torch.Tensor, starts: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
    """See `torch_spans.span_sums`."""
    assert score.stride(0) == 1
    out = score.new_empty(len(starts), dtype=torch.float64)
    if len(starts):
        launch(_sum, (len(starts),), score, starts.contiguous(), stops.contiguous(), out, BLOCK=_BLOCK)
    return out


@triton.jit
def _sum(score: tl.tensor, starts: tl.tensor, stops: tl.tensor, out: tl.tensor, BLOCK: tl.constexpr) -> None:
    span = tl.program_id(0)
    start, stop = tl.load(starts + span).to(tl.int32), tl.load(stops + span).to(tl.int32)
    total = tl.zeros([BLOCK], tl.float64)
    for begin in range(start, stop, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        total += tl.load(score + i, mask=i < stop, other=0.0).to(tl.float64)
    tl.store(out + span, tl.sum(total, 0))
