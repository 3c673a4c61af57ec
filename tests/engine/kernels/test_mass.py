"""Attention mass and peak, torch and Triton, against a literal float64 softmax."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolling_kv.engine.kernels import attention_mass, attention_peak, triton_mass
from tests.engine.kernels.literal import EXACTNESS, Attention, error
from tests.engine.kernels.test_attention import TERMS


def ours(case: Attention, *, context: int, run: Any) -> torch.Tensor:
    out: torch.Tensor = run(
        case.query,
        case.key,
        rows=case.rows * case.gap,
        positions=case.positions,
        context=context,
        scaling=case.scaling,
        sliding_window=case.window,
        softcap=case.softcap,
        sinks=case.sinks,
    )
    return out


def check(case: Attention, *, context: int, mass: Any, peak: Any, most: float) -> None:
    weights = case.weights()[..., :context]
    group = len(weights) // case.key.shape[1]
    expected = weights.sum(dim=(0, 1))
    received = ours(case, context=context, run=mass)
    assert received.dtype == torch.float32
    assert error(received, expected) < most
    largest = torch.stack([own.amax(dim=(0, 1)) for own in weights.split(group)]).mean(0)
    assert error(ours(case, context=context, run=peak), largest) < most


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize(("context", "rows"), [(60, 1), (50, 9), (5, 20), (1, 1), (0, 5)])
@pytest.mark.usefixtures("implementation")
def test_a_query_after_its_context(context: int, rows: int, terms: str) -> None:
    slots = list(range(context, context + rows))
    case = Attention.random(rows=slots, keys=context + rows, **TERMS[terms])
    check(case, context=context, mass=attention_mass, peak=attention_peak, most=EXACTNESS[torch.float32])


@pytest.mark.parametrize("dtype", EXACTNESS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.usefixtures("implementation")
def test_head_sizes_and_dtypes(head_dim: int, dtype: torch.dtype) -> None:
    case = Attention.random(
        rows=list(range(40, 46)), keys=46, kv_heads=1, group=4, head_dim=head_dim, dtype=dtype
    )
    check(case, context=40, mass=attention_mass, peak=attention_peak, most=EXACTNESS[dtype])


@settings(max_examples=8, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_shape(data: st.DataObject) -> None:
    context, rows = data.draw(st.integers(0, 50)), data.draw(st.integers(1, 8))
    case = Attention.random(
        rows=list(range(context, context + rows)),
        keys=context + rows,
        kv_heads=data.draw(st.integers(1, 2)),
        group=data.draw(st.integers(1, 4)),
        gap=data.draw(st.integers(1, 3)),
        window=data.draw(st.none() | st.integers(1, 100)),
        softcap=data.draw(st.none() | st.floats(0.5, 30.0)),
        sinks=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 9)),
    )
    check(
        case,
        context=context,
        mass=triton_mass.attention_mass,
        peak=triton_mass.attention_peak,
        most=EXACTNESS[torch.float32],
    )


@pytest.mark.usefixtures("implementation")
def test_few_rows_over_many_keys() -> None:
    """The log-sum-exp is found in parts."""
    case = Attention.random(rows=[300, 301], keys=302)
    check(case, context=300, mass=attention_mass, peak=attention_peak, most=EXACTNESS[torch.float32])
