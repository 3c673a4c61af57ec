"""Every kernel against float64, on random inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.scale import Scale
from rolling_kv.engine import kernels

_MOST = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
_TERMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all terms": {"sliding_window": 700, "softcap": 4.0, "sinks": True, "gap": 2},
}


def run(scale: Scale, *, head_dim: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    """One entry a check: what it was, the relative error, the largest that rounding explains, the verdict."""
    torch.manual_seed(0)
    results = []
    for check, error, most in [*_attention(scale, head_dim, dtype), *_rows(scale, head_dim, dtype)]:
        name = f"{check}, heads of {head_dim}, {str(dtype).removeprefix('torch.')}"
        results.append({"check": name, "error": error, "most": most, "passed": error <= most})
    score = torch.rand(scale.check_keys, device=scale.device)
    starts, stops = torch.tensor([[0, 3, 7], [3, 7, scale.check_keys]], device=scale.device)
    expected = torch.stack([score[a:b].double().sum() for a, b in zip(starts, stops, strict=True)])
    error = relative(kernels.span_sums(score, starts, stops), expected)
    results.append({"check": "span sums", "error": error, "most": 1e-12, "passed": error <= 1e-12})
    return results


def relative(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """||ours - reference|| / ||reference||; what is not a number never passes."""
    return float((ours.double() - reference.double()).norm() / reference.double().norm())


def _attention(scale: Scale, head_dim: int, dtype: torch.dtype) -> Iterator[tuple[str, float, float]]:
    count, (heads, kv_heads) = scale.check_keys, scale.check_heads
    query = torch.randn(1, count, heads, head_dim, device=scale.device).to(dtype).transpose(1, 2) * 2
    key, value = (torch.randn(1, kv_heads, count, head_dim, device=scale.device).to(dtype) for _ in "kv")
    chosen = {
        "scattered rows": torch.randperm(count)[: count // 5].sort().values,
        "contiguous rows": torch.arange(count // 2, count // 2 + count // 5),
        "the last row": torch.tensor([count - 1]),
    }
    for name, terms in _TERMS.items():
        given = dict(terms)
        gap = given.pop("gap", 1)
        sinks = torch.randn(heads, device=scale.device) if given.pop("sinks", False) else None
        for rows_name, slots in chosen.items():
            slots = slots.to(scale.device)
            some = query[:, :, slots]
            positions = torch.arange(count, device=scale.device) * gap
            shared = {"rows": slots * gap, "scaling": head_dim**-0.5, "sinks": sinks, **given}
            weights = _weights(some, key, positions=positions, **shared)
            expected = weights @ value[0].double().repeat_interleave(heads // kv_heads, 0)
            seen = None if gap == 1 else positions
            first, again = (
                kernels.sparse_row_attention(some, key, value, positions=seen, **shared) for _ in range(2)
            )
            yield f"attention, {rows_name}, {name}", relative(first[0], expected), _MOST[dtype]
            yield f"attention, {rows_name}, {name}, other bits again", float(not torch.equal(first, again)), 0
        context = count - 20
        tail = {"rows": positions[context:], "scaling": head_dim**-0.5, "sinks": sinks, **given}
        last = query[:, :, context:]
        weights = _weights(last, key, positions=positions, **tail)[..., :context]
        mass = kernels.attention_mass(last, key, positions=positions, context=context, **tail)
        yield f"mass, {name}", relative(mass, weights.sum((0, 1))), _MOST[dtype]
        peak = kernels.attention_peak(last, key, positions=positions, context=context, **tail)
        expected = torch.stack([own.amax((0, 1)) for own in weights.split(heads // kv_heads)]).mean(0)
        yield f"peak, {name}", relative(peak, expected), _MOST[dtype]


def _weights(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    rows: torch.Tensor,
    positions: torch.Tensor,
    scaling: float,
    sinks: torch.Tensor | None,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Softmax weights, [heads, rows, keys], float64."""
    repeated = key[0].double().repeat_interleave(query.shape[1] // key.shape[1], 0)
    scores = query[0].double() @ repeated.mT * scaling
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    apart = rows[:, None] - positions
    hidden = (apart < 0) | (apart >= (sliding_window or 1 << 40))
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.double()[:, None, None].expand(*scores.shape[:2], 1)
    return torch.cat((scores, sink), -1).softmax(-1)[..., :-1]


def _rows(scale: Scale, head_dim: int, dtype: torch.dtype) -> Iterator[tuple[str, float, float]]:
    count, kv_heads = scale.check_keys, scale.check_heads[1]
    stored, other = (torch.randn(kv_heads, count, head_dim, device=scale.device).to(dtype) for _ in "ab")
    slots = torch.randperm(count, device=scale.device)
    angles = torch.randn(count, head_dim // 2, dtype=torch.float64, device=scale.device)
    out = torch.full_like(stored, float("nan"))
    kernels.remap_keys(stored, angles.cos().float(), angles.sin().float(), out=out, slots=slots)
    first, second = stored.double().chunk(2, -1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    yield "remap", relative(out[:, slots], torch.cat((turned.real, turned.imag), -1)), _MOST[dtype]
    deviation = kernels.key_deviation(stored, other, rows=slots)
    expected = (stored[:, slots].double() - other.double()).square().sum((0, 2))
    yield "deviation", relative(deviation, expected), 1e-6
    keys, values = torch.full((2, 1, *stored.shape), float("nan"), dtype=dtype, device=scale.device)
    kernels.scatter_rows(stored[None], other[None], keys=keys, values=values, slots=slots)
    same = torch.equal(keys[0][:, slots], stored) and torch.equal(values[0][:, slots], other)
    yield "scatter, wrong bits", float(not same), 0
