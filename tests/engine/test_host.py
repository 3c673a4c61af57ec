"""Passes of the host against the stock forward of transformers, in float32, on every family."""

from __future__ import annotations

import random

import pytest
import torch

from rolling_kv.engine import host
from rolling_kv.engine.host import TransformersHost
from rolling_kv.engine.stitch import PlacedKV
from tests.engine.stock import stock_kv, stock_logits

TOLERANCE = 1e-4


def random_ids(count: int, *, seed: int) -> tuple[int, ...]:
    source = random.Random(seed)
    return tuple(source.randrange(256) for _ in range(count))


def stitched_in_parts(engine: TransformersHost, parts: list[tuple[int, ...]], *, capacity: int):  # type: ignore[no-untyped-def]
    """Isolated parts at consecutive positions."""
    placed, position = [], 0
    for part in parts:
        placed.append(PlacedKV(kv=engine.extend([], part), position=position))
        position += len(part)
    return engine.stitch(placed, capacity=capacity)


def test_extending_segment_by_segment_is_the_stock_prefill(tiny_engine: TransformersHost) -> None:
    parts = [random_ids(length, seed=length) for length in (17, 1, 40, 33)]
    context = []
    for part in parts:
        context.append(tiny_engine.extend(context, part))
    reference = stock_kv(tiny_engine, [token for part in parts for token in part])
    for layer, (keys, values) in enumerate(reference):
        ours_k = torch.cat([segment.k[layer] for segment in context], dim=1)
        ours_v = torch.cat([segment.v[layer] for segment in context], dim=1)
        torch.testing.assert_close(ours_k, keys, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(ours_v, values, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("position", [1, 7, 300, 1900])
def test_a_remapped_document_is_the_document_prefilled_there(
    tiny_engine: TransformersHost, position: int
) -> None:
    ids = random_ids(60, seed=1)
    stored = tiny_engine.extend([], ids)
    stitched = tiny_engine.stitch([PlacedKV(kv=stored, position=position)], capacity=position + len(ids))
    for layer, (keys, values) in enumerate(stock_kv(tiny_engine, ids, start=position)):
        ours_k, ours_v = stitched.layer(layer)
        torch.testing.assert_close(ours_k[0, :, position:], keys, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(ours_v[0, :, position:], values, atol=TOLERANCE, rtol=0)


def test_remapping_by_nothing_changes_no_bit(tiny_engine: TransformersHost) -> None:
    first, second = random_ids(20, seed=1), random_ids(20, seed=2)
    stored = [tiny_engine.extend([], first), tiny_engine.extend([], second)]
    placed = [PlacedKV(kv=stored[0], position=0), PlacedKV(kv=stored[1], position=20)]
    keys, _ = tiny_engine.stitch(placed, capacity=40).layer(3)
    assert torch.equal(keys[0, :, :20], stored[0].k[3])
    assert not torch.equal(keys[0, :, 20:], stored[1].k[3])


@pytest.mark.parametrize("rows", ["all", "some", "last"])
def test_fused_rows_over_exact_kv_are_the_stock_rows(tiny_engine: TransformersHost, rows: str) -> None:
    """Whatever rows are recomputed over KV that is exact but for those rows, the last logits are the
    stock's."""
    ids = random_ids(130, seed=3)
    reference = stock_logits(tiny_engine, ids)[-1]
    exact = tiny_engine.extend([], ids)
    stitched = tiny_engine.stitch([PlacedKV(kv=exact, position=0)], capacity=len(ids))
    chosen = {"all": set(range(130)), "some": {0, 3, 4, 5, 60, 61, 99, 129}, "last": {129}}[rows]
    positions = torch.tensor(sorted(chosen))
    for layer in range(tiny_engine.layers):
        for tensor in stitched.layer(layer):
            tensor[:, :, positions] = 9e3
    logits = tiny_engine.fuse(stitched, ids, rows=positions)
    torch.testing.assert_close(logits, reference, atol=TOLERANCE, rtol=0)


def test_a_selected_row_sees_no_position_after_its_own(tiny_engine: TransformersHost) -> None:
    """Garbage in every later position changes no bit of what an earlier row computes."""
    ids = random_ids(120, seed=4)
    rows = torch.tensor([5, 40, 41, 70, 119])

    def fused(poison: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
        stitched = stitched_in_parts(tiny_engine, [ids[:60], ids[60:]], capacity=120)
        for layer in range(tiny_engine.layers):
            for tensor in stitched.layer(layer):
                tensor[:, :, 71:119] += poison
        tiny_engine.fuse(stitched, ids, rows=rows)
        return [stitched.layer(layer) for layer in range(tiny_engine.layers)]

    clean, poisoned = fused(0.0), fused(50.0)
    for (clean_k, clean_v), (poisoned_k, poisoned_v) in zip(clean, poisoned, strict=True):
        assert torch.equal(clean_k[:, :, rows[:-1]], poisoned_k[:, :, rows[:-1]])
        assert torch.equal(clean_v[:, :, rows[:-1]], poisoned_v[:, :, rows[:-1]])
    last_k, last_poisoned_k = clean[-1][0], poisoned[-1][0]
    assert not torch.equal(last_k[:, :, 119], last_poisoned_k[:, :, 119]), "the last row does see them"


@pytest.mark.parametrize("block", [2048, 32])
def test_deviations_are_the_distance_to_the_stock_keys(
    tiny_engine: TransformersHost, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_ROWS", block)
    ids = random_ids(110, seed=5)
    for layer in (1, 3):
        stitched = stitched_in_parts(tiny_engine, [ids[:30], ids[30:80], ids[80:]], capacity=110)
        stored = stitched.layer(layer)[0][0].clone()
        ours = tiny_engine.deviations(stitched, ids, rows=torch.arange(30, 110), layer=layer)
        current = stock_kv(tiny_engine, ids)[layer][0]
        expected = (current.double() - stored.double()).square().sum(dim=(0, 2))[30:]
        torch.testing.assert_close(ours.double(), expected, atol=1e-3, rtol=1e-4)
        fresh = stitched.layer(layer)[0][0]
        torch.testing.assert_close(fresh[:, 30:], current[:, 30:], atol=TOLERANCE, rtol=0)


def test_decoding_goes_on_as_the_stock_model_does(tiny_engine: TransformersHost) -> None:
    ids = random_ids(90, seed=6)
    stitched = tiny_engine.stitch([], capacity=100)
    logits = tiny_engine.fuse(stitched, ids, rows=torch.arange(90))
    tokens = list(ids)
    for position in range(90, 100):
        torch.testing.assert_close(logits, stock_logits(tiny_engine, tokens)[-1], atol=TOLERANCE, rtol=0)
        tokens.append(int(logits.argmax()))
        logits = tiny_engine.follow(stitched, [tokens[-1]], position=position)[-1]


def test_the_stock_prefill_of_the_host_is_untouched_by_ours(tiny_engine: TransformersHost) -> None:
    ids = random_ids(90, seed=7)
    logits, cache = tiny_engine.stock_prefill(ids)
    torch.testing.assert_close(logits, stock_logits(tiny_engine, ids)[-1], atol=TOLERANCE, rtol=0)
    tiny_engine.extend([], ids)
    after = tiny_engine.stock_follow(cache, [65])[-1]
    torch.testing.assert_close(after, stock_logits(tiny_engine, [*ids, 65])[-1], atol=TOLERANCE, rtol=0)


def test_the_same_pass_gives_the_same_bits_after_any_other(tiny_engine: TransformersHost) -> None:
    """No state leaks from call to call: long, then short, then long."""
    long, short = random_ids(200, seed=8), random_ids(3, seed=9)
    first = tiny_engine.extend([tiny_engine.extend([], short)], long)
    tiny_engine.extend([], long)
    tiny_engine.extend([], short)
    again = tiny_engine.extend([tiny_engine.extend([], short)], long)
    assert torch.equal(first.k, again.k)
    assert torch.equal(first.v, again.v)
