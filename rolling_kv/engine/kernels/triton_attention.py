"""Attention of sparse rows over fused KV on a GPU: flash-style, masked by position.

A program takes a block of rows of one key head, the heads of its group laid out as rows, and walks over the
keys that some row of it sees (Dao, 2023, FlashAttention-2). Keys that all of its rows see need no mask: for
contiguous rows that is nearly all of them, for scattered ones all up to the first row. Few rows over many
keys are split over the keys, and the parts are joined by their log-sum-exp.
"""

from __future__ import annotations

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
    operand,
    scores,
    visible,
)


def sparse_row_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    rows: torch.Tensor,
    scaling: float,
    sliding_window: int | None = None,
    positions: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `torch_attention.sparse_row_attention`."""
    _, heads, row_count, head_dim = query.shape
    kv_heads, key_count = key.shape[1], key.shape[2]
    group = heads // kv_heads
    assert query.stride(3) == key.stride(3) == value.stride(3) == rows.stride(0) == 1
    block, step = row_block(group * row_count, head_dim, key.dtype), key_block(head_dim, key.dtype)
    blocks = triton.cdiv(group * row_count, block)
    parts = splits(blocks * kv_heads, keys=key_count, step=step)
    shape = (parts, row_count, heads, head_dim)
    out = query.new_empty(shape, dtype=torch.float32 if parts > 1 else query.dtype)
    log_sums = query.new_empty(shape[:3], dtype=torch.float32) if parts > 1 else None
    launch(
        _attend,
        (blocks, kv_heads, parts),
        *(query, key, value, out, log_sums, rows, positions, sinks, row_count, key_count),
        *(ENDLESS if sliding_window is None else sliding_window, scaling, softcap or 0.0),
        *(query.stride(2), query.stride(1), key.stride(2), key.stride(1), value.stride(2), value.stride(1)),
        warps=warps(block, head_dim),
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=width(head_dim),
        BLOCK_M=block,
        BLOCK_N=step,
        GAPS=positions is not None,
        SOFTCAP=softcap is not None,
        SINKS=sinks is not None,
        SPLIT=parts > 1,
    )
    if log_sums is not None:
        weights = log_sums.mul_(0.6931471805599453).softmax(0)
        out = (out * weights[..., None]).sum(0, keepdim=True).to(query.dtype)
    return out.transpose(1, 2)


@triton.jit
def _steps(
    q: tl.tensor,
    total: tl.tensor,
    top: tl.tensor,
    mass: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    at: tl.tensor,
    d: tl.tensor,
    positions: tl.tensor,
    begin: int,
    skipped: int,
    resumed: int,
    stop: int,
    key_count: int,
    window: int,
    scaling: float,
    softcap: float,
    key_stride: int,
    value_stride: int,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GAPS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The online softmax over the keys from `begin` to `stop`, without those from `skipped` to `resumed`."""
    for step in range(begin, stop - (resumed - skipped), BLOCK_N):
        start = tl.where(step < skipped, step, step + (resumed - skipped))
        n = start + tl.arange(0, BLOCK_N)
        k = load_keys(key, start, key_stride, key_count, d, HEAD_DIM, BLOCK_N, MASKED)
        s = scores(q, tl.trans(k), scaling, softcap, SOFTCAP)
        if MASKED:
            s = tl.where(visible(at, key_positions(n, positions, key_count, GAPS), window), s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen nothing yet
        weights = tl.exp2(s - shift[:, None])
        decay = tl.exp2(top - shift)
        v = load_keys(value, start, value_stride, key_count, d, HEAD_DIM, BLOCK_N, MASKED)
        rounded = operand(weights.to(value.dtype.element_ty))
        total = tl.dot(rounded, v, total * decay[:, None], input_precision="ieee")
        mass = mass * decay + tl.sum(weights, 1)
        top = new_top
    return total, top, mass


@triton.jit(do_not_specialize=["row_count", "key_count", "window"])
def _attend(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    out: tl.tensor,
    log_sums: tl.tensor,
    rows: tl.tensor,
    positions: tl.tensor,
    sinks: tl.tensor,
    row_count: int,
    key_count: int,
    window: int,
    scaling: float,
    softcap: float,
    query_row: int,
    query_head: int,
    key_token: int,
    key_head: int,
    value_token: int,
    value_head: int,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GAPS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    kv_head, part = tl.program_id(1), tl.program_id(2)
    start = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # the last rows see the most: they begin
    m = start + tl.arange(0, BLOCK_M)
    row = tl.minimum(m // GROUP, row_count - 1)
    head = kv_head * GROUP + m % GROUP
    d = tl.arange(0, BLOCK_D)
    at = tl.load(rows + row).to(tl.int32)
    first = tl.load(rows + start // GROUP).to(tl.int32)
    last = tl.load(rows + tl.minimum((start + BLOCK_M - 1) // GROUP, row_count - 1)).to(tl.int32)
    # Some row sees the keys of low..stop, every row those of whole..stop_whole.
    low = keys_before(positions, key_count, first - window + 1, GAPS) // BLOCK_N * BLOCK_N
    stop = keys_before(positions, key_count, last + 1, GAPS)
    whole = tl.cdiv(keys_before(positions, key_count, last - window + 1, GAPS), BLOCK_N) * BLOCK_N
    stop_whole = keys_before(positions, key_count, first + 1, GAPS) // BLOCK_N * BLOCK_N
    share = tl.cdiv(tl.cdiv(stop - low, BLOCK_N), tl.num_programs(2)) * BLOCK_N
    begin = tl.minimum(low + part * share, stop)
    stop = tl.minimum(begin + share, stop)
    whole = tl.minimum(tl.maximum(whole, begin), stop)
    stop_whole = tl.maximum(tl.minimum(stop_whole, stop), whole)

    q = load_rows(query, row, head, query_row, query_head, d, HEAD_DIM)
    key += kv_head.to(tl.int64) * key_head
    value += kv_head.to(tl.int64) * value_head
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:  # a sink is a score without a value
        top = tl.where(part == 0, tl.load(sinks + head).to(tl.float32) * LOG2E, top)
        mass = tl.where(part == 0, 1.0, mass)
    # fmt: off
    total, top, mass = _steps(
        q, total, top, mass, key, value, at, d, positions, whole, stop_whole, stop_whole, stop_whole,
        key_count, window, scaling, softcap, key_token, value_token,
        HEAD_DIM, BLOCK_N, GAPS, SOFTCAP, MASKED=False,
    )
    total, top, mass = _steps(
        q, total, top, mass, key, value, at, d, positions, begin, whole, stop_whole, stop,
        key_count, window, scaling, softcap, key_token, value_token,
        HEAD_DIM, BLOCK_N, GAPS, SOFTCAP, MASKED=True,
    )
    # fmt: on
    total = total / tl.where(mass == 0.0, 1.0, mass)[:, None]
    heads = GROUP * tl.num_programs(1)
    place = (part.to(tl.int64) * row_count + row) * heads + head
    kept = m < row_count * GROUP
    tl.store(
        out + place[:, None] * HEAD_DIM + d[None, :],
        total.to(out.dtype.element_ty),
        mask=kept[:, None] & (d < HEAD_DIM)[None, :],
    )
    if SPLIT:
        tl.store(log_sums + place, top + tl.log2(tl.maximum(mass, 1e-37)), mask=kept)
