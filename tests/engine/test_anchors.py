"""Anchors against literal readings of their rules."""

from __future__ import annotations

import math
import random

import pytest
import torch

from rolling_kv.engine.anchors import anchor_tokens
from rolling_kv.engine.host import TransformersHost
from tests.engine.stock import stock_attention


def ids_of(count: int, *, seed: int) -> tuple[int, ...]:
    source = random.Random(seed)
    return tuple(source.randrange(256) for _ in range(count))


DOCUMENT = ids_of(31, seed=2)


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 1.0])
def test_sinks_are_the_first_tokens(llama_engine: TransformersHost, ratio: float) -> None:
    kv = llama_engine.extend([], DOCUMENT)
    anchors = anchor_tokens(llama_engine, kv, rule="sink", ratio=ratio)
    assert anchors == tuple(range(math.ceil(ratio * 31)))


def test_knorm_keeps_the_smallest_keys(llama_engine: TransformersHost) -> None:
    kv = llama_engine.extend([], DOCUMENT)
    norms = []
    for token in range(31):
        heads = [kv.k[layer, head, token].double() for layer in range(6) for head in range(2)]
        norms.append(sum(math.sqrt(float((key * key).sum())) for key in heads) / len(heads))
    expected = sorted(sorted(range(31), key=lambda token: norms[token])[:4])
    assert anchor_tokens(llama_engine, kv, rule="knorm", ratio=0.1) == tuple(expected)


def test_kvzip_is_the_attention_from_a_repetition(tiny_engine: TransformersHost) -> None:
    """Against transformers' own weights of the whole text: document, request to repeat, document."""
    kv = tiny_engine.extend([], DOCUMENT)
    ours = anchor_tokens(tiny_engine, kv, rule="kvzip", ratio=0.2)
    request = tiny_engine.tokenizer.encode("\n\nRepeat the previous context exactly:\n", special=False)
    whole = torch.tensor([[*DOCUMENT, *request, *DOCUMENT]])
    with torch.inference_mode(), stock_attention(tiny_engine) as model:
        weights = model(whole, use_cache=False, output_attentions=True).attentions
    scores = torch.zeros(len(DOCUMENT), dtype=torch.float64)
    for layer in weights:
        received = layer[0, :, len(DOCUMENT) :, : len(DOCUMENT)].double()  # [heads, repetition, document]
        groups = received.reshape(tiny_engine.kv_heads, -1, *received.shape[1:])
        scores += groups.amax(dim=(1, 2)).mean(dim=0)
    expected = scores.topk(math.ceil(0.2 * len(DOCUMENT))).indices.sort().values.tolist()
    assert ours == tuple(expected)
