"""Deviations of a sample: which tokens, what the others are taken for, and against those of all tokens."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolling_kv import RollingSession
from rolling_kv.call import placed_segments
from rolling_kv.engine.host import TransformersHost
from rolling_kv.errors import ConfigError
from rolling_kv.policies.base import Need
from rolling_kv.sampling import estimated, sampled_tokens
from rolling_kv.signals import Signals
from tests.settings import REPAIRING

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=6)
SHARES = st.floats(0.01, 1.0)


def open_session(engine: TransformersHost, **options: object) -> RollingSession:
    settings = REPAIRING | {"instruction": "Answer from the notes.", "window": 6} | options
    session = RollingSession.open(model=engine, **settings)
    session.extend([f"Note {n} of the day says {n * 7919 % 1000}." for n in range(6)])
    return session


@settings(deadline=None, derandomize=True)
@given(lengths=LENGTHS, share=SHARES)
def test_every_segment_has_its_share_evenly_spread(lengths: list[int], share: float) -> None:
    chosen = sampled_tokens(lengths, share).tolist()
    assert chosen == sorted(set(chosen))
    start = 0
    for length in lengths:
        own = [token - start for token in chosen if start <= token < start + length]
        assert len(own) == math.ceil(share * length)
        steps = [b - a for a, b in pairwise(own)]
        assert not steps or max(steps) - min(steps) <= 1
        assert abs(own[0] - (length - 1 - own[-1])) <= 1, "as far from the beginning as from the end"
        start += length
    assert max(chosen) < start


@settings(deadline=None, derandomize=True)
@given(lengths=LENGTHS, share=SHARES)
def test_other_tokens_are_taken_for_the_nearest_of_their_segment(lengths: list[int], share: float) -> None:
    chosen = sampled_tokens(lengths, share).tolist()
    score = torch.arange(len(chosen)) * 10.0
    found = estimated(score, lengths, share).tolist()
    start = 0
    for length in lengths:
        own = [token for token in chosen if start <= token < start + length]
        for token in range(start, start + length):
            nearest = min(own, key=lambda one: (abs(one - token), one))
            assert found[token] == score[chosen.index(nearest)]
        start += length
    assert len(found) == start


def test_by_hand() -> None:
    assert sampled_tokens([8, 3], 0.25).tolist() == [2, 6, 9]
    scores = estimated(torch.tensor([1.0, 2.0, 3.0]), [8, 3], 0.25)
    assert scores.tolist() == [1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3]


@pytest.mark.parametrize("share", [0.1, 0.4])
def test_a_sample_deviates_as_among_all_tokens(tiny_engine: TransformersHost, share: float) -> None:
    """At layer 1 a sampled token's deviation does not depend on which others are in the sample."""
    with open_session(tiny_engine, conditioning="isolated") as session:
        prompt = session.prompt("Which?")
        plan = session._planner.plan(prompt)
        kv, _ = session._ingestor.ensure(plan.stored)

        def score(of: float) -> torch.Tensor:
            signals = Signals(
                engine=tiny_engine,
                plan=plan,
                selection_layer=1,
                anchors=lambda: [],
                degraded=pytest.fail,
                deviation_sample=of,
            )
            stitched = tiny_engine.stitch(placed_segments(plan, kv), capacity=len(prompt))
            return signals.score(Need("deviation", "selection"), stitched=stitched, k=5)

        every = score(1.0)
        lengths = [len(segment.token_ids) for segment in plan.reusable]
        literal = estimated(every[sampled_tokens(lengths, share)], lengths, share)
        torch.testing.assert_close(score(share), literal, rtol=1e-3, atol=1e-4)
        assert not torch.allclose(literal, every, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("policy", ["document-aligned", "token-topk", "single-window", "fixed-chunk"])
def test_policies_choose_by_a_sample_and_the_trace_says_so(
    llama_engine: TransformersHost, policy: str
) -> None:
    with open_session(llama_engine, policy=policy, ratio=0.2, deviation_sample=0.25) as session:
        sampled = session.ask("Which?", max_new_tokens=1)
        again = session.ask("Which?", max_new_tokens=1)
        every = session.ask("Which?", max_new_tokens=1, deviation_sample=1.0)
        measured = session.ask("Which?", max_new_tokens=1, measure_deviation=True)
    assert sampled.trace.selection.deviation_sample == 0.25
    assert every.trace.selection.deviation_sample == 1.0
    assert sampled.usage.recomputed == every.usage.recomputed > 0
    assert sampled.trace.logits_fingerprint == again.trace.logits_fingerprint
    assert sampled.trace.selection.captured_deviation is None, "an estimate is not what was captured"
    assert every.trace.selection.captured_deviation is not None
    assert measured.trace.selected == sampled.trace.selected
    assert 0 < measured.trace.selection.captured_deviation <= 1  # type: ignore[operator]


def test_policies_without_deviations_report_no_sample(llama_engine: TransformersHost) -> None:
    with open_session(llama_engine, policy="epic", deviation_sample=0.5) as session:
        assert session.ask("Which?", max_new_tokens=1).trace.selection.deviation_sample is None


@pytest.mark.parametrize("share", [0, 0.0, -0.1, 1.5, True, "all", None])
def test_what_is_no_share_is_refused(llama_engine: TransformersHost, share: object) -> None:
    with pytest.raises(ConfigError, match="deviation_sample"):
        open_session(llama_engine, deviation_sample=share)
    with open_session(llama_engine) as session, pytest.raises(ConfigError, match="deviation_sample"):
        session.ask("Which?", deviation_sample=share)  # type: ignore[arg-type]


def test_a_policy_that_narrows_all_tokens_down_takes_no_sample(llama_engine: TransformersHost) -> None:
    with (
        open_session(llama_engine, policy="token-topk-gradual", deviation_sample=0.5) as session,
        pytest.raises(ConfigError, match="token-topk-gradual"),
    ):
        session.ask("Which?")
