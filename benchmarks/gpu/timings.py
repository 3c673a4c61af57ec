"""How long kernels take, beside torch and beside what the machine can do at best.

Ceilings are measured in the same run: a device-to-device copy (bytes read and written) and a square matrix
product. Times are medians of `triton.testing.do_bench`, which empties the cache between runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.scale import Scale
from rolling_kv.engine import kernels


def run(scale: Scale) -> dict[str, Any]:
    torch.manual_seed(0)
    ceilings = _ceilings(scale)
    timed = []
    for tokens in scale.lengths:
        timed += _attention(scale, tokens) + _others(scale, tokens)
    for entry in timed:
        if entry.get("bytes"):
            entry["GB/s"] = entry["bytes"] / entry["ms"] / 1e6
            entry["of the copy"] = entry["GB/s"] / ceilings["copy GB/s"]
        if entry.get("flop"):
            entry["TFLOP/s"] = entry["flop"] / entry["ms"] / 1e9
            entry["of the product"] = entry["TFLOP/s"] / ceilings["product TFLOP/s"]
    return {"ceilings": ceilings, "timed": timed}


def _median(scale: Scale, call: Callable[[], Any]) -> float:
    """Milliseconds."""
    if scale.interpreted:
        started = time.perf_counter()
        call()
        return (time.perf_counter() - started) * 1e3
    from triton.testing import do_bench

    return float(do_bench(call, warmup=20, rep=100, return_mode="median"))


def _ceilings(scale: Scale) -> dict[str, float]:
    source = torch.randint(0, 255, (scale.copy_bytes // 2,), dtype=torch.uint8, device=scale.device)
    target = torch.empty_like(source)
    copy = _median(scale, lambda: target.copy_(source))
    side = scale.product
    left, right = (torch.randn(side, side, device=scale.device).to(scale.dtype) for _ in "lr")
    product = _median(scale, lambda: left @ right)
    return {
        "copy GB/s": scale.copy_bytes / copy / 1e6,
        "product TFLOP/s": 2 * side**3 / product / 1e9,
        "copy ms": copy,
        "product ms": product,
    }


def _attention(scale: Scale, tokens: int) -> list[dict[str, Any]]:
    """Selected rows and a query over fused KV: ours, torch with a mask, and a prefill's dense attention.

    torch is given keys repeated for every head, and the mask, before the clock starts: so it has a fused
    kernel for them.
    """
    heads, kv_heads, dim = scale.heads, scale.kv_heads, scale.head_dim
    key, value = (_random(scale, 1, kv_heads, tokens, dim) for _ in "kv")
    repeated = [tensor.repeat_interleave(heads // kv_heads, 1) for tensor in (key, value)]
    timed = []
    for name, rows in _selections(scale, tokens).items():
        query = _random(scale, 1, len(rows), heads, dim).transpose(1, 2)
        mask = torch.arange(tokens, device=scale.device) <= rows[:, None]
        work = {
            "tokens": tokens,
            "rows": len(rows),
            "selection": name,
            "flop": 4 * heads * dim * int((rows + 1).sum()),
            "bytes": 2 * (key.numel() + query.numel()) * key.element_size(),
        }
        ours = _median(
            scale,
            lambda q=query, r=rows: kernels.sparse_row_attention(q, key, value, rows=r, scaling=dim**-0.5),
        )
        timed.append({"kernel": "attention", "ms": ours, **work})
        masked = _median(
            scale,
            lambda q=query, m=mask: F.scaled_dot_product_attention(q, *repeated, attn_mask=m),
        )
        timed.append({"kernel": "torch attention with a mask", "ms": masked, **work})
    query = _random(scale, 1, heads, tokens, dim)
    backends = [SDPBackend.MATH] if scale.interpreted else [SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(backends):
        dense = _median(
            scale, lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        )
    flop = 4 * heads * dim * tokens * (tokens + 1) // 2
    timed.append({"kernel": "dense flash attention", "ms": dense, "tokens": tokens, "flop": flop})
    return timed


def _selections(scale: Scale, tokens: int) -> dict[str, torch.Tensor]:
    """Rows by name, each with the query at the end: whole documents, single tokens, and a decoded token."""
    start = tokens - scale.query
    query = torch.arange(start, tokens)
    length = start // scale.documents
    chosen = {"decode": torch.tensor([tokens - 1])}
    for ratio in scale.ratios:
        k = max(1, int(ratio * start))
        documents = torch.randperm(scale.documents)[: max(1, k // length)]
        spans = (documents[:, None] * length + torch.arange(length)).flatten()
        chosen[f"documents {ratio:.0%}"] = torch.cat((spans.sort().values, query))
        scattered = torch.randperm(start)[:k].sort().values
        chosen[f"tokens {ratio:.0%}"] = torch.cat((scattered, query))
    return {name: rows.to(scale.device) for name, rows in chosen.items()}


def _others(scale: Scale, tokens: int) -> list[dict[str, Any]]:
    kv_heads, dim, heads = scale.kv_heads, scale.head_dim, scale.heads
    stored, buffer = (_random(scale, kv_heads, tokens, dim) for _ in "sb")
    angles = torch.rand(tokens, dim // 2, device=scale.device)
    cos, sin, slots = angles.cos(), angles.sin(), torch.arange(tokens, device=scale.device)
    size = stored.numel() * stored.element_size()
    k = max(1, int(scale.ratios[-1] * tokens))
    fresh, some = _random(scale, 1, kv_heads, k, dim), slots[:k]
    query, rows = _random(scale, 1, heads, scale.query, dim), slots[-scale.query :]
    context = tokens - scale.query
    calls: dict[str, tuple[Callable[[], Any], dict[str, int]]] = {
        "remap": (
            lambda: kernels.remap_keys(stored, cos, sin, out=buffer, slots=slots),
            {"bytes": 2 * size + 2 * angles.numel() * 4},
        ),
        "scatter": (
            lambda: kernels.scatter_rows(fresh, fresh, keys=buffer[None], values=stored[None], slots=some),
            {"bytes": 3 * fresh.numel() * fresh.element_size(), "rows": k},
        ),
        "deviation": (lambda: kernels.key_deviation(buffer, stored, rows=slots), {"bytes": 2 * size}),
        "mass": (
            lambda: kernels.attention_mass(
                query, stored[None], rows=rows, positions=slots, context=context, scaling=dim**-0.5
            ),
            {"bytes": 2 * size, "flop": 4 * heads * dim * scale.query * tokens, "rows": scale.query},
        ),
    }
    return [
        {"kernel": name, "ms": _median(scale, call), "tokens": tokens, **work}
        for name, (call, work) in calls.items()
    ]


def _random(scale: Scale, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=scale.device).to(scale.dtype)
