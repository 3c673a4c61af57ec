"""Small KV and lineages to store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from rolling_kv.kv import ModelIdentity, SegmentKV
from rolling_kv.store import Lineage, make_lineage

IDENTITY = ModelIdentity(
    name="tiny-llama",
    model="11" * 16,
    tokenizer="22" * 16,
    rope="33" * 16,
    dtype="float32",
    device="cpu",
    runtime="torch 0, transformers 0",
)
INSTRUCTION = (1, 2, 3)


def lineage(
    *token_ids: int,
    identity: ModelIdentity = IDENTITY,
    namespace: str = "default",
    before: Sequence[Sequence[int]] = (INSTRUCTION,),
) -> Lineage:
    """Of the segment `token_ids`, computed after the segments `before` it."""
    return make_lineage(identity, namespace=namespace, path=[*before, token_ids])


def in_dtype(dtype: str) -> ModelIdentity:
    return replace(IDENTITY, dtype=dtype)


def kv_of(
    lineage: Lineage, *, seed: int = 0, layers: int = 2, heads: int = 3, head_dim: int = 4
) -> SegmentKV:
    """KV of that lineage's shape and dtype; the same seed gives the same bits."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, layers, heads, len(lineage.segment.token_ids), head_dim)
    values = torch.randn(shape, generator=generator).to(getattr(torch, lineage.identity.dtype))
    return SegmentKV(
        k=values[0].clone(),
        v=values[1].clone(),
        token_ids=lineage.segment.token_ids,
        start=lineage.segment.start,
    )


def assert_same(found: SegmentKV | None, expected: SegmentKV) -> None:
    """Equal to the bit, in the same dtype, for the same tokens at the same place."""
    assert found is not None
    assert (found.token_ids, found.start) == (expected.token_ids, expected.start)
    for mine, theirs in ((found.k, expected.k), (found.v, expected.v)):
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        assert torch.equal(mine.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))
