"""The demo models, real weights and real text, float32, against the stock forward of transformers."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch

from rolling_kv import RollingSession
from rolling_kv.engine.host import TransformersHost
from rolling_kv.engine.stitch import PlacedKV
from rolling_kv.workloads.market import MarketQuestion, market_events, market_question
from tests.engine.stock import stock_kv, stock_logits
from tests.settings import REPAIRING

EVENTS = list(islice(market_events(3), 24))
QUESTION = market_question(EVENTS[4:], seed=3, step=0)


@pytest.fixture(scope="module")
def session(demo_engine: TransformersHost) -> RollingSession:
    """A window that has rolled by four, longer than gemma3's sliding window of 512 tokens."""
    opened = RollingSession.open(
        model=demo_engine, instruction="Answer from the records.", window=20, ingest="lazy", **REPAIRING
    )
    opened.extend([event.text for event in EVENTS])
    assert len(opened.prompt(QUESTION.query)) > 600
    return opened


def test_ratio_one_is_the_stock_forward(session: RollingSession) -> None:
    ids = session.prompt_token_ids(QUESTION.query, answer_prefix=QUESTION.answer_prefix)
    reference = stock_logits(session.engine, ids)[-1]
    for ratio, tolerance in ((1.0, 1e-4), (0.0, None)):
        logits = session.next_token_logits(QUESTION.query, answer_prefix=QUESTION.answer_prefix, ratio=ratio)
        if tolerance is None:
            assert not torch.allclose(logits, reference, atol=1e-2)
        else:
            torch.testing.assert_close(logits, reference, atol=tolerance, rtol=0)


@pytest.mark.parametrize("position", [1, 100, 640, 4000])
def test_a_remapped_document_is_the_document_prefilled_there(
    demo_engine: TransformersHost, position: int
) -> None:
    """At the first layer, where only the rotation acts, within 1e-5; everywhere within 1e-4 of the layer.

    Single keys of deeper layers are compared only near the start: further on the model itself, whose angles
    are float32, gives other values at other positions, as its values show, which nothing moves.
    """
    ids = demo_engine.tokenizer.encode(EVENTS[0].text + "\n", special=False)
    placed = PlacedKV(kv=demo_engine.extend([], ids), position=position)
    stitched = demo_engine.stitch([placed], capacity=position + len(ids))
    for layer, (keys, values) in enumerate(stock_kv(demo_engine, ids, start=position)):
        ours_k, ours_v = (tensor[0, :, position:] for tensor in stitched.layer(layer))
        if layer == 0:
            torch.testing.assert_close(ours_k, keys, atol=1e-5, rtol=0)
        if position <= 100:
            for ours, stock in ((ours_k, keys), (ours_v, values)):  # gemma3's keys reach tens
                largest = max(1.0, float(stock.abs().max()))
                torch.testing.assert_close(ours, stock, atol=1e-4 * largest, rtol=0)
        assert (ours_k - keys).norm() <= 1e-4 * keys.norm()
        assert (ours_v - values).norm() <= 1e-4 * values.norm()


def test_a_selected_row_sees_no_position_after_its_own(demo_engine: TransformersHost) -> None:
    ids = demo_engine.tokenizer.encode(" ".join(event.text for event in EVENTS[:4]), special=False)
    exact = demo_engine.extend([], ids)
    rows = torch.tensor([3, 50, len(ids) - 1])

    def fused(poison: float) -> torch.Tensor:
        stitched = demo_engine.stitch([PlacedKV(kv=exact, position=0)], capacity=len(ids))
        for layer in range(demo_engine.layers):
            stitched.layer(layer)[0][:, :, 51:-1] += poison
        demo_engine.fuse(stitched, ids, rows=rows)
        return torch.stack([stitched.layer(layer)[0][0, :, rows[:-1]] for layer in range(demo_engine.layers)])

    assert torch.equal(fused(0.0), fused(3.0))


def test_error_to_full_prefill_does_not_rise_with_the_ratio(session: RollingSession) -> None:
    """Mean squared error of the logits over two questions about one window."""
    errors = torch.zeros(4, dtype=torch.float64)
    for step in range(2):
        asked = market_question(EVENTS[4:], seed=5, step=step)
        reference = _logits(session, asked, policy="full-prefill")
        for index, ratio in enumerate((0.0, 0.25, 0.5, 1.0)):
            errors[index] += (_logits(session, asked, ratio=ratio) - reference).square().mean()
    assert errors[-1] < 1e-8
    assert bool((errors.diff() <= 0).all()), errors.tolist()


def _logits(session: RollingSession, asked: MarketQuestion, **options: Any) -> torch.Tensor:
    logits = session.next_token_logits(asked.query, answer_prefix=asked.answer_prefix, **options)
    return logits.double()


def test_the_template_renders_exactly_these_ids(session: RollingSession) -> None:
    """Segments tokenised on their own make the ids that the model's own template makes of the whole."""
    tokenizer = session.engine.tokenizer
    user = "".join(f"{document.text}\n" for document in session.documents) + QUESTION.query.strip()
    messages = [
        {"role": "system", "content": "Answer from the records."},
        {"role": "user", "content": user},
    ]
    rendered = tokenizer.render(messages)
    if rendered is None:
        expected = tokenizer.prefix_ids + tokenizer.encode(
            f"Answer from the records.\n\n{user}", special=True
        )
    else:
        expected = tokenizer.encode(rendered, special=True)
    assert session.prompt_token_ids(QUESTION.query) == expected
