"""What the attention kernels share: which keys a block of rows sees, and their scores."""

from __future__ import annotations

import triton
import triton.language as tl

from rolling_kv.engine.kernels.triton_launch import WIDE

LOG2E = tl.constexpr(1.4426950408889634)
NOWHERE = tl.constexpr(0x7FFFFFFF)  # the position of keys that do not exist, after every row


@triton.jit
def operand(x: tl.tensor) -> tl.tensor:
    """`x` as `tl.dot` takes it."""
    if WIDE:
        return x.to(tl.float32)
    return x


@triton.jit
def keys_before(positions: tl.tensor, key_count: int, bound: int, GAPS: tl.constexpr) -> tl.tensor:
    """How many keys stand at a position before `bound`; a binary search when positions have gaps."""
    if GAPS:
        low = bound * 0
        high = low + key_count
        while low < high:
            middle = (low + high) // 2
            before = tl.load(positions + middle).to(tl.int32) < bound
            low = tl.where(before, middle + 1, low)
            high = tl.where(before, high, middle)
        return low
    return tl.minimum(tl.maximum(bound, 0), key_count)


@triton.jit
def key_positions(n: tl.tensor, positions: tl.tensor, key_count: int, GAPS: tl.constexpr) -> tl.tensor:
    """The positions of the keys `n`; those that do not exist stand after every row."""
    if GAPS:
        return tl.load(positions + n, mask=n < key_count, other=NOWHERE).to(tl.int32)
    return tl.where(n < key_count, n, NOWHERE)


@triton.jit
def visible(at: tl.tensor, keys: tl.tensor, window: int) -> tl.tensor:
    """Which keys, by position, each row sees, [rows, keys]: causal, and no further back than the window."""
    return (keys[None, :] <= at[:, None]) & (keys[None, :] > at[:, None] - window)


@triton.jit
def scores(q: tl.tensor, k: tl.tensor, scaling: float, softcap: float, SOFTCAP: tl.constexpr) -> tl.tensor:
    """Scores of `q` [rows, dim] and `k` [dim, keys], float32, times log2(e): exp2 of them is softmax's exp.

    |tanh(x)| = (1 - e) / (1 + e) with e = exp(-2|x|), which cannot overflow.
    """
    s = tl.dot(q, k, input_precision="ieee") * scaling
    if SOFTCAP:
        e = tl.exp(-2.0 * tl.abs(s) / softcap)
        s = softcap * tl.where(s < 0.0, e - 1.0, 1.0 - e) / (1.0 + e)
    return s * LOG2E


@triton.jit
def load_rows(
    base: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    row_stride: int,
    head_stride: int,
    d: tl.tensor,
    HEAD_DIM: tl.constexpr,
) -> tl.tensor:
    """The query block [rows, dim] of (row, head) pairs, as `tl.dot` takes it."""
    start = row.to(tl.int64) * row_stride + head.to(tl.int64) * head_stride
    return operand(tl.load(base + start[:, None] + d[None, :], mask=d[None, :] < HEAD_DIM, other=0.0))


@triton.jit
def load_keys(
    base: tl.tensor,
    start: int,
    stride: tl.tensor,
    key_count: int,
    d: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """A block [keys, dim] of keys or values of one head, as `tl.dot` takes it; zeros where there is none."""
    n = tl.arange(0, BLOCK_N)
    places = base + start * stride.to(tl.int64) + (n * stride)[:, None] + d[None, :]
    if MASKED:
        mask = (start + n < key_count)[:, None] & (d < HEAD_DIM)[None, :]
        return operand(tl.load(places, mask=mask, other=0.0))
    if d.shape[0] == HEAD_DIM:
        return operand(tl.load(places))
    return operand(tl.load(places, mask=(d < HEAD_DIM)[None, :], other=0.0))
