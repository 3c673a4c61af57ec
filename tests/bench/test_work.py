"""Counting computation: products with weights against torch's own counter, keys seen against a mask."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rolling_kv import RollingSession
from rolling_kv.bench.work import Work, keys_seen
from rolling_kv.engine.host import TransformersHost

NOTES = ("Alice paid 12 dollars for the lamp.", "Bob sold the red chair to Carol.", "It rained on Monday.")


@pytest.mark.parametrize("policy", ["full-prefill", "direct-reuse", "epic", "document-aligned"])
def test_products_with_weights_are_those_that_torch_counts(
    llama_engine: TransformersHost, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Torch counts two operations a multiplication; what attention does is not among its matrix products."""
    logits = llama_engine._model.lm_head.weight.numel()
    layers = [replace(layer, attention_width=0) for layer in llama_engine.layer_shapes]
    monkeypatch.setattr(llama_engine, "layer_shapes", layers)
    with RollingSession.open(
        model=llama_engine,
        instruction="Remember.",
        conditioning="isolated",
        policy=policy,
        ratio=None if policy == "direct-reuse" else 0.3,
    ) as session:
        session.extend(NOTES)
        with Work(llama_engine) as work, FlopCounterMode(display=False) as counter:
            session.ask("Who paid?", max_new_tokens=1)
    products = {str(op): flops // 2 for op, flops in counter.get_flop_counts()["Global"].items()}
    assert work.counted + logits == products["aten.mm"]


def test_attention_is_counted_by_the_keys_that_are_seen(llama_engine: TransformersHost) -> None:
    weights = sum(layer.weights for layer in llama_engine.layer_shapes)
    width = llama_engine.layer_shapes[0].attention_width
    with RollingSession.open(model=llama_engine, conditioning="isolated", policy="direct-reuse") as session:
        session.extend(NOTES)
        with Work(llama_engine) as work:
            usage = session.ask("Who paid?", max_new_tokens=1).usage
    first = usage.prompt_tokens - usage.computed
    seen = sum(row + 1 for row in range(first, usage.prompt_tokens))
    expected = usage.computed * weights + 2 * llama_engine.layers * width * seen
    assert work.counted == expected == work.of(usage.computed, behind=first)
    assert llama_engine.on_pass is None, "nobody watches behind the context"


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("positions", [None, (0, 1, 2, 7, 8, 9, 10)])
def test_keys_seen_are_those_that_a_mask_shows(window: int | None, positions: tuple[int, ...] | None) -> None:
    rows = torch.tensor([1, 8, 10])
    keys = torch.arange(11) if positions is None else torch.tensor(positions)
    shown = keys[None] <= rows[:, None]
    if window is not None:
        shown &= keys[None] > rows[:, None] - window
    given = None if positions is None else keys
    assert keys_seen(rows, given, sliding_window=window) == int(shown.sum())
