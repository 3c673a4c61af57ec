"""Attention mass and peak from a query to its context on a GPU, in two passes and without the matrix.

The first pass finds every row's log-sum-exp over all that it sees, split over the keys when rows are few. The
second takes one block of context keys a program, computes their scores again, and adds up (or takes the
largest of) their weights over rows and heads, always in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from rolling_kv.engine.kernels.triton_launch import (
    ENDLESS,
    key_block,
    launch,
    row_block,
    splits,
    warps,
    width,
)
from rolling_kv.engine.kernels.triton_scores import (
    LOG2E,
    key_positions,
    keys_before,
    load_keys,
    load_rows,
    scores,
    visible,
)

_LN2 = 0.6931471805599453


def attention_mass(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    rows: torch.Tensor,
    positions: torch.Tensor,
    context: int,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `torch_mass.attention_mass`."""
    return _received(
        query, key, rows, positions, context, scaling, sliding_window, softcap, sinks, peak=False
    )


def attention_peak(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    rows: torch.Tensor,
    positions: torch.Tensor,
    context: int,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `torch_mass.attention_peak`."""
    total = _received(
        query, key, rows, positions, context, scaling, sliding_window, softcap, sinks, peak=True
    )
    return total / key.shape[1]


def _received(
    query: torch.Tensor,
    key: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    context: int,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    *,
    peak: bool,
) -> torch.Tensor:
    """What each context token receives: the sum over heads and rows, or over key heads of their largest."""
    _, heads, row_count, head_dim = query.shape
    kv_heads, key_count = key.shape[1], key.shape[2]
    group = heads // kv_heads
    assert query.stride(3) == key.stride(3) == rows.stride(0) == positions.stride(0) == 1
    block, step = row_block(group * row_count, head_dim, key.dtype), key_block(head_dim, key.dtype)
    blocks = triton.cdiv(group * row_count, block)
    parts = splits(blocks * kv_heads, keys=key_count, step=step)

    def run(kernel: Any, grid: tuple[int, ...], *outputs: Any, **constants: Any) -> None:
        launch(
            kernel,
            grid,
            *(query, key, *outputs, rows, positions, row_count, key_count),
            *(ENDLESS if sliding_window is None else sliding_window, scaling, softcap or 0.0),
            *(query.stride(2), query.stride(1), key.stride(2), key.stride(1)),
            warps=warps(block, head_dim),
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_D=width(head_dim),
            BLOCK_M=block,
            BLOCK_N=step,
            SOFTCAP=softcap is not None,
            **constants,
        )

    log_sums = query.new_empty((parts, kv_heads, row_count * group), dtype=torch.float32)
    run(_log_sums, (blocks, kv_heads, parts), log_sums, sinks, SINKS=sinks is not None)
    received = query.new_empty(context, dtype=torch.float32)
    if context:
        totals = log_sums.mul_(_LN2).logsumexp(0).div_(_LN2)
        run(_add_up, (triton.cdiv(context, step),), totals, received, kv_heads, context, PEAK=peak)
    return received


@triton.jit(do_not_specialize=["row_count", "key_count", "window"])
def _log_sums(
    query: tl.tensor,
    key: tl.tensor,
    log_sums: tl.tensor,
    sinks: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    row_count: int,
    key_count: int,
    window: int,
    scaling: float,
    softcap: float,
    query_row: int,
    query_head: int,
    key_token: int,
    key_head: int,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
) -> None:
    start, kv_head, part = tl.program_id(0) * BLOCK_M, tl.program_id(1), tl.program_id(2)
    m = start + tl.arange(0, BLOCK_M)
    row = tl.minimum(m // GROUP, row_count - 1)
    head = kv_head * GROUP + m % GROUP
    d = tl.arange(0, BLOCK_D)
    at = tl.load(rows + row).to(tl.int32)
    first = tl.load(rows + start // GROUP).to(tl.int32)
    last = tl.load(rows + tl.minimum((start + BLOCK_M - 1) // GROUP, row_count - 1)).to(tl.int32)
    low = keys_before(positions, key_count, first - window + 1, True) // BLOCK_N * BLOCK_N
    stop = keys_before(positions, key_count, last + 1, True)
    share = tl.cdiv(tl.cdiv(stop - low, BLOCK_N), tl.num_programs(2)) * BLOCK_N
    begin = tl.minimum(low + part * share, stop)
    stop = tl.minimum(begin + share, stop)

    q = load_rows(query, row, head, query_row, query_head, d, HEAD_DIM)
    key += kv_head.to(tl.int64) * key_head
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        top = tl.where(part == 0, tl.load(sinks + head).to(tl.float32) * LOG2E, top)
        mass = tl.where(part == 0, 1.0, mass)
    for step in range(begin, stop, BLOCK_N):
        n = step + tl.arange(0, BLOCK_N)
        k = load_keys(key, step, key_token, key_count, d, HEAD_DIM, BLOCK_N, True)
        s = scores(q, tl.trans(k), scaling, softcap, SOFTCAP)
        s = tl.where(visible(at, key_positions(n, positions, key_count, True), window), s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        mass = mass * tl.exp2(top - shift) + tl.sum(tl.exp2(s - shift[:, None]), 1)
        top = new_top
    count = row_count * GROUP
    place = (part.to(tl.int64) * tl.num_programs(1) + kv_head) * count + m
    tl.store(log_sums + place, top + tl.log2(tl.maximum(mass, 1e-37)), mask=m < count)


@triton.jit(do_not_specialize=["row_count", "key_count", "window", "kv_heads", "context"])
def _add_up(
    query: tl.tensor,
    key: tl.tensor,
    log_sums: tl.tensor,
    received: tl.tensor,
    kv_heads: int,
    context: int,
    rows: tl.tensor,
    positions: tl.tensor,
    row_count: int,
    key_count: int,
    window: int,
    scaling: float,
    softcap: float,
    query_row: int,
    query_head: int,
    key_token: int,
    key_head: int,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PEAK: tl.constexpr,
) -> None:
    begin = tl.program_id(0) * BLOCK_N
    n = begin + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    keys = key_positions(n, positions, key_count, True)
    count = row_count * GROUP
    result = tl.zeros([BLOCK_N], tl.float32)
    for kv_head in range(kv_heads):
        k = tl.trans(load_keys(key, begin, key_token, key_count, d, HEAD_DIM, BLOCK_N, True))
        largest = tl.zeros([BLOCK_N], tl.float32)
        for start in range(0, count, BLOCK_M):
            m = start + tl.arange(0, BLOCK_M)
            row = tl.minimum(m // GROUP, row_count - 1)
            at = tl.load(rows + row).to(tl.int32)
            q = load_rows(query, row, kv_head * GROUP + m % GROUP, query_row, query_head, d, HEAD_DIM)
            log_sum = tl.load(log_sums + m, mask=m < count, other=0.0)
            s = scores(q, k, scaling, softcap, SOFTCAP)
            seen = visible(at, keys, window) & (m < count)[:, None]
            weights = tl.where(seen, tl.exp2(s - log_sum[:, None]), 0.0)
            if PEAK:
                largest = tl.maximum(largest, tl.max(weights, 0))
            else:
                result += tl.sum(weights, 0)
        result += largest
        key += key_head
        log_sums += count
    tl.store(received + n, result, mask=n < context)
