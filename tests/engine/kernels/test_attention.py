"""Attention of sparse rows, torch and Triton, against a literal float64 softmax."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolling_kv.engine.kernels import sparse_row_attention, triton_attention
from tests.engine.kernels.literal import EXACTNESS, Attention, error

ROWS = {
    "first": [0],
    "single": [69],
    "contiguous": list(range(30, 52)),
    "scattered": [0, 3, 4, 35, 36, 52, 69],
    "runs": [*range(8, 16), *range(45, 50), 69],
    "all": list(range(70)),
}
TERMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 20},
    "gaps": {"gap": 3},
    "gaps in a window": {"gap": 3, "window": 40},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "everything": {"gap": 2, "window": 30, "softcap": 1.5, "sinks": True},
}


def ours(case: Attention, run: Any = sparse_row_attention) -> torch.Tensor:
    out: torch.Tensor = run(
        case.query,
        case.key,
        case.value,
        rows=case.rows * case.gap,
        scaling=case.scaling,
        sliding_window=case.window,
        positions=None if case.gap == 1 else case.positions,
        softcap=case.softcap,
        sinks=case.sinks,
    )
    return out


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.usefixtures("implementation")
def test_rows_and_terms(rows: str, terms: str) -> None:
    case = Attention.random(rows=ROWS[rows], **TERMS[terms])
    assert error(ours(case), case.output()) < EXACTNESS[torch.float32]


@pytest.mark.parametrize("dtype", EXACTNESS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.usefixtures("implementation")
def test_head_sizes_and_dtypes(head_dim: int, dtype: torch.dtype) -> None:
    for terms in ({}, {"softcap": 1.5, "sinks": True}):
        case = Attention.random(
            rows=ROWS["scattered"], head_dim=head_dim, dtype=dtype, kv_heads=1, group=3, **terms
        )
        out = ours(case)
        assert out.dtype == dtype
        assert error(out, case.output()) < EXACTNESS[dtype]


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (3, 1), (1, 7), (2, 5), (2, 8), (1, 16)])
@pytest.mark.usefixtures("implementation")
def test_groups(kv_heads: int, group: int) -> None:
    case = Attention.random(rows=ROWS["runs"], kv_heads=kv_heads, group=group)
    assert error(ours(case), case.output()) < EXACTNESS[torch.float32]


@pytest.mark.parametrize("terms", TERMS)
def test_keys_split_over_programs_are_joined_again(terms: str) -> None:
    """One row over 300 keys is computed in parts."""
    case = Attention.random(rows=[299], keys=300, **TERMS[terms])
    assert error(ours(case, triton_attention.sparse_row_attention), case.output()) < EXACTNESS[torch.float32]


@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_shape(data: st.DataObject) -> None:
    keys = data.draw(st.integers(1, 80))
    rows = sorted(data.draw(st.sets(st.integers(0, keys - 1), min_size=1, max_size=12)))
    case = Attention.random(
        rows=rows,
        keys=keys,
        kv_heads=data.draw(st.integers(1, 2)),
        group=data.draw(st.integers(1, 4)),
        head_dim=data.draw(st.sampled_from([4, 16, 24])),
        gap=data.draw(st.integers(1, 3)),
        window=data.draw(st.none() | st.integers(1, 200)),
        softcap=data.draw(st.none() | st.floats(0.5, 30.0)),
        sinks=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 9)),
    )
    assert error(ours(case, triton_attention.sparse_row_attention), case.output()) < EXACTNESS[torch.float32]


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.usefixtures("implementation")
def test_what_a_row_must_not_see_changes_no_bit(terms: str) -> None:
    case = Attention.random(rows=[40, 41, 60], **TERMS[terms])
    clean = ours(case)
    for seen, hidden in ((60, slice(61, None)), (41, slice(42, None)), (40, slice(41, None))):
        key, value = case.key.clone(), case.value.clone()
        key[:, :, hidden] = value[:, :, hidden] = 9e3
        index = [40, 41, 60].index(seen)
        again = ours(dataclasses.replace(case, key=key, value=value))
        assert torch.equal(again[:, :, : index + 1], clean[:, :, : index + 1])


@pytest.mark.usefixtures("implementation")
def test_keys_after_the_last_row_and_before_the_window_are_not_read() -> None:
    case = Attention.random(rows=[160, 161, 165], keys=250, window=20)
    clean = ours(case)
    for unread in (slice(0, 128), slice(192, None)):  # no block of keys reaches there
        case.key[:, :, unread] = case.value[:, :, unread] = float("nan")
    assert torch.equal(ours(case), clean)


@pytest.mark.usefixtures("implementation")
def test_the_same_inputs_give_the_same_bits() -> None:
    case = Attention.random(rows=ROWS["runs"], **TERMS["everything"])
    assert torch.equal(ours(case), ours(case))
