"""Whole models on either implementation, against the stock forward of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from rolling_kv.engine import interception
from rolling_kv.engine.host import TransformersHost
from rolling_kv.engine.stitch import PlacedKV
from tests.engine.stock import stock_logits
from tests.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("implementation")

IDS = [(7 * token * token + 3 * token) % 250 for token in range(36)]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_moved_documents_and_recomputed_rows_are_the_stock_forward(family: str) -> None:
    """Exact KV computed elsewhere, moved back, with some rows poisoned and recomputed: remap, scatter,
    attention."""
    engine = TransformersHost(tiny_model(family), tiny_tokenizer(), name=family)
    first = engine.extend([], IDS[:20])
    second = engine.extend([first], IDS[20:])
    stitched = engine.stitch(
        [PlacedKV(kv=first, position=0), PlacedKV(kv=second, position=20)], capacity=len(IDS)
    )
    away = engine.stitch([PlacedKV(kv=second, position=90)], capacity=90 + len(second))
    rows = torch.tensor([0, 5, 6, 15, 21, 22, 35])
    for layer in range(engine.layers):
        there = second.k[layer]
        assert not torch.equal(away.layer(layer)[0][0, :, 90:], there)
        for tensor in stitched.layer(layer):
            tensor[:, :, rows] = 9e3
    logits = engine.fuse(stitched, IDS, rows=rows)
    torch.testing.assert_close(logits, stock_logits(engine, IDS)[-1], atol=1e-4, rtol=0)
    rows = torch.arange(20, 36)
    deviation = engine.deviations(stitched, IDS, rows=rows, layer=1)
    torch.testing.assert_close(deviation, torch.zeros(16), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gemma2", {"sliding_window": 16, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16}),
        ("gpt_oss", {"sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_soft_caps_and_sinks_reach_the_attention(family: str, settings: dict[str, Any]) -> None:
    """Their models pass them to the attention function registered with transformers."""
    config = CONFIG_MAPPING[family](
        vocab_size=260,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.3,
        pad_token_id=0,
        **settings,
    )
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).eval()
    rows = torch.arange(len(IDS))
    with torch.inference_mode():
        expected = model(torch.tensor([IDS]), use_cache=False).logits
        interception.register()
        model.set_attn_implementation(interception.ATTENTION_NAME)
        ours = model(
            torch.tensor([IDS]),
            position_ids=rows[None],
            use_cache=True,
            rolling=interception.PassView(rows=rows),
            cache=interception.PassCache(lambda layer, keys, values: (keys, values)),
        ).logits
    torch.testing.assert_close(ours, expected, atol=2e-4, rtol=0)
