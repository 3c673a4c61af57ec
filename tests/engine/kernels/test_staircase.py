"""The staircase of rows and the keys that they see: covered once, and joined to the literal attention."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolling_kv.engine.kernels import torch_staircase
from rolling_kv.engine.kernels.torch_attention import sparse_row_attention
from rolling_kv.engine.kernels.torch_staircase import staircase
from tests.engine.kernels.literal import EXACTNESS, Attention, error

ROWS = {
    "scattered": list(range(3, 900, 17)),
    "documents and a query": [*range(40, 130), *range(400, 490), *range(880, 900)],
    "a run after others": list(range(300, 600)),
    "the last of the keys": list(range(100, 900)),
    "one": [899],
}


@pytest.fixture
def no_loss(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every part that can be split is split."""
    monkeypatch.setattr(torch_staircase, "_LOSS", 0)
    staircase.cache_clear()
    yield
    staircase.cache_clear()


def covered(counts: list[int]) -> torch.Tensor:
    """How often the parts cover each key of each row, [rows, keys], where a mask hides nothing."""
    times = torch.zeros(len(counts), counts[-1], dtype=torch.int64)
    seen = torch.arange(counts[-1]) < torch.tensor(counts)[:, None]
    for part in staircase(tuple(counts)):
        rows, keys = slice(part.first, part.stop), slice(part.low, part.high)
        assert part.masked or bool(seen[rows, keys].all())
        times[rows, keys] += seen[rows, keys]
    return times


@settings(max_examples=60, deadline=None, derandomize=True)
@given(counts=st.lists(st.integers(1, 3000), min_size=1, max_size=40))
def test_every_key_that_a_row_sees_is_covered_once(counts: list[int]) -> None:
    counts = sorted(counts)
    seen = torch.arange(counts[-1]) < torch.tensor(counts)[:, None]
    assert torch.equal(covered(counts), seen.long())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(counts=st.lists(st.integers(1, 3000), min_size=1, max_size=40))
def test_the_first_part_of_every_row_begins_at_the_first_key(counts: list[int]) -> None:
    met: set[int] = set()
    for part in staircase(tuple(sorted(counts))):
        rows = set(range(part.first, part.stop))
        assert rows <= met if part.low else not rows & met
        met |= rows
    assert met == set(range(len(counts)))


def test_little_is_computed_in_vain() -> None:
    """Of scattered rows over 7,400 keys, parts without a mask cover nine tenths."""
    counts = list(range(1, 7400, 18))
    dense = sum((p.stop - p.first) * (p.high - p.low) for p in staircase(tuple(counts)) if not p.masked)
    assert dense > 0.9 * sum(counts)
    assert len(staircase(tuple(counts))) < 60


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gap", [1, 3])
def test_parts_are_joined_to_the_whole(rows: str, dtype: torch.dtype, gap: int) -> None:
    case = Attention.random(
        rows=ROWS[rows][:: 1 if rows == "scattered" else 7], keys=900, dtype=dtype, gap=gap
    )
    out = sparse_row_attention(
        case.query,
        case.key,
        case.value,
        rows=case.rows * gap,
        scaling=case.scaling,
        positions=None if gap == 1 else case.positions,
    )
    assert out.dtype == dtype
    assert error(out, dense(case)) < EXACTNESS[dtype]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.usefixtures("no_loss")
def test_however_small_the_parts_are(rows: str) -> None:
    case = Attention.random(rows=ROWS[rows], keys=900)
    out = sparse_row_attention(case.query, case.key, case.value, rows=case.rows, scaling=case.scaling)
    assert error(out, dense(case)) < EXACTNESS[torch.float32]


@pytest.mark.parametrize("before", [0, 1, 40, 300])
def test_rows_that_are_the_last_of_the_keys(before: int) -> None:
    case = Attention.random(rows=list(range(before, 400)), keys=400)
    out = sparse_row_attention(case.query, case.key, case.value, rows=case.rows, scaling=case.scaling)
    assert error(out, dense(case)) < EXACTNESS[torch.float32]


def dense(case: Attention) -> torch.Tensor:
    """The whole softmax at once, in float64; the loops of `literal.py` would take too long."""
    group = case.query.shape[1] // case.key.shape[1]
    query, key, value = (tensor[0].double() for tensor in (case.query, case.key, case.value))
    scores = query @ key.repeat_interleave(group, dim=0).mT * case.scaling
    hidden = torch.arange(key.shape[1]) > case.rows[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights @ value.repeat_interleave(group, dim=0))[None]


def test_the_reference_is_the_literal_one() -> None:
    case = Attention.random(rows=[0, 7, 30, 31], keys=40)
    assert error(dense(case), case.output()) < 1e-12
