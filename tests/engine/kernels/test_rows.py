"""Remapping, scatter, deviation and span sums, torch and Triton, against literal float64 versions."""

from __future__ import annotations

import math

import pytest
import torch

from rolling_kv.engine.kernels import key_deviation, remap_keys, scatter_rows, span_sums
from rolling_kv.engine.rope import Rope
from tests.engine.kernels.literal import EXACTNESS, error

pytestmark = pytest.mark.usefixtures("implementation")


def literal_rotation(
    keys: torch.Tensor, angles: torch.Tensor, *, half: int, interleaved: bool
) -> torch.Tensor:
    """Every pair of dimensions as a complex number, turned by its angle."""
    out = keys.double().clone()
    for token in range(keys.shape[1]):
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            c, s = math.cos(float(angles[token, i])), math.sin(float(angles[token, i]))
            x, y = keys[:, token, a].double(), keys[:, token, b].double()
            out[:, token, a], out[:, token, b] = x * c - y * s, x * s + y * c
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "half"), [(16, 8), (64, 32), (80, 40), (80, 16), (96, 48), (256, 128)])
@pytest.mark.parametrize("dtype", EXACTNESS)
def test_keys_are_rotated_gathered_and_placed(
    head_dim: int, half: int, interleaved: bool, dtype: torch.dtype
) -> None:
    source = torch.Generator().manual_seed(head_dim + half)
    stored = torch.randn(3, 50, head_dim, generator=source).to(dtype)
    tokens = torch.tensor([0, 3, 4, 17, 49, 20])
    slots = torch.tensor([5, 6, 20, 21, 22, 63])
    angles = torch.randn(len(tokens), half, generator=source).double() * 3
    out = torch.full((3, 64, head_dim), 7.0, dtype=dtype)
    turned = {"cos": angles.cos().float(), "sin": angles.sin().float()}
    assert remap_keys(stored, **turned, out=out, slots=slots, tokens=tokens, interleaved=interleaved) is out
    expected = literal_rotation(stored[:, tokens], angles, half=half, interleaved=interleaved)
    assert error(out[:, slots], expected) < EXACTNESS[dtype]
    untouched = torch.ones(64, dtype=torch.bool)
    untouched[slots] = False
    assert bool((out[:, untouched] == 7.0).all())


def test_keys_of_many_tokens_go_to_a_new_tensor() -> None:
    stored = torch.randn(2, 70, 24, generator=torch.Generator().manual_seed(1))
    rope = Rope(tables=(torch.linspace(1.0, 0.01, 12),), layer_table=(0,))
    from_, to = torch.arange(70), torch.arange(70) * 5 + 300
    cos, sin = rope.rotations(from_, to)[0]
    angles = (to - from_).double()[:, None] * rope.tables[0].double()
    expected = literal_rotation(stored, angles, half=12, interleaved=False)
    torch.testing.assert_close(remap_keys(stored, cos, sin).double(), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("dtype", EXACTNESS)
def test_no_difference_changes_no_bit(dtype: torch.dtype) -> None:
    stored = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert torch.equal(remap_keys(stored, torch.ones(9, 32), torch.zeros(9, 32)), stored)


@pytest.mark.parametrize("dtype", EXACTNESS)
@pytest.mark.parametrize("head_dim", [16, 80, 256])
def test_rows_are_scattered(head_dim: int, dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(head_dim)
    as_a_model_has_it = torch.randn(2, 1, 21, 3, head_dim, generator=source).to(dtype)
    fresh = as_a_model_has_it.transpose(2, 3)
    slots = torch.randperm(60, generator=source)[:21]
    keys, values = torch.zeros(2, 1, 3, 60, head_dim, dtype=dtype)
    scatter_rows(fresh[0], fresh[1], keys=keys, values=values, slots=slots)
    for buffer, rows in ((keys, fresh[0]), (values, fresh[1])):
        for slot in range(60):
            found = (slots == slot).nonzero().flatten().tolist()
            expected = rows[:, :, found[0]] if found else torch.zeros(1, 3, head_dim, dtype=dtype)
            assert torch.equal(buffer[:, :, slot], expected)


@pytest.mark.parametrize("dtype", EXACTNESS)
@pytest.mark.parametrize("head_dim", [16, 80, 256])
def test_deviation(head_dim: int, dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(head_dim)
    current = torch.randn(3, 60, head_dim, generator=source).to(dtype)
    stored = torch.randn(3, 19, head_dim, generator=source).to(dtype)
    rows = torch.randperm(60, generator=source)[:19].sort().values
    ours = key_deviation(current, stored, rows=rows)
    assert ours.dtype == torch.float32
    expected = [
        sum(float((current[h, row].double() - stored[h, i].double()).square().sum()) for h in range(3))
        for i, row in enumerate(rows.tolist())
    ]
    assert error(ours, torch.tensor(expected, dtype=torch.float64)) < 1e-6
    assert bool((key_deviation(stored, stored, rows=torch.arange(19)) == 0).all())


def test_span_sums() -> None:
    score = torch.randn(2000, generator=torch.Generator().manual_seed(3)).abs()
    spans = [(0, 1), (0, 2000), (5, 5), (7, 300), (255, 257), (256, 512), (1999, 2000), (2000, 2000)]
    starts, stops = (torch.tensor(side) for side in zip(*spans, strict=True))
    ours = span_sums(score, starts, stops)
    expected = [math.fsum(score[start:stop].tolist()) for start, stop in spans]
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=1e-12)
    assert span_sums(score, starts[:0], stops[:0]).shape == (0,)


def test_a_small_span_beside_a_huge_score_keeps_its_sum() -> None:
    score = torch.tensor([1e30, 1e-3, 2e-3])
    ours = span_sums(score, torch.tensor([0, 1]), torch.tensor([1, 3]))
    torch.testing.assert_close(ours[1], score[1:].double().sum(), atol=0.0, rtol=1e-12)
