"""Answers that depend on what came before: where they do, and that they never do under the contract.

The modes that break the contract are the control: the test that finds nothing under the contract finds
differing answers with them.
"""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest
import torch

from rolling_kv import RollingSession
from rolling_kv.engine.host import TransformersHost
from rolling_kv.errors import ConfigError
from tests.engine.stock import stock_kv, stock_logits
from tests.settings import REPAIRING

INSTRUCTION = "Answer from the notes."
QUERY = "Which number did note 3 say?"
CONTRACT = ("isolated", "instruction", "window:2", "full")
HISTORICAL = ("first-seen", "write-back")


def note(number: int) -> str:
    return f"Note {number} of the day says {number * 7919 % 1000}."


def opened(engine: TransformersHost, conditioning: str, **options: object) -> RollingSession:
    deterministic = conditioning in CONTRACT
    settings = REPAIRING | {"instruction": INSTRUCTION, "window": 4, "deterministic": deterministic} | options
    return RollingSession.open(model=engine, **(settings | {"conditioning": conditioning}))


def logits_after(engine: TransformersHost, conditioning: str, histories: list[list[int]]) -> set[bytes]:
    """The logits over notes 3 to 6 after each history, which asks at every step."""
    found = set()
    for history in histories:
        with opened(engine, conditioning, policy="token-topk", ratio=0.1) as session:
            for number in [*history, 3, 4, 5, 6]:
                session.append(note(number))
                session.ask(QUERY, max_new_tokens=1)
            found.add(session.next_token_logits(QUERY).numpy().tobytes())
    return found


HISTORIES = [[], [9], [0, 1, 2], [6, 5, 4, 3], [4, 8, 6, 0, 5]]


@pytest.mark.parametrize("conditioning", CONTRACT)
def test_under_the_contract_history_leaves_no_trace(
    llama_engine: TransformersHost, conditioning: str
) -> None:
    assert len(logits_after(llama_engine, conditioning, HISTORIES)) == 1


def test_the_defaults_keep_the_contract(llama_engine: TransformersHost) -> None:
    """Longer than the neighbours reach, so that the window has an edge, stored KV and a fresh document."""
    found = set()
    for history in HISTORIES:
        with RollingSession.open(model=llama_engine, instruction=INSTRUCTION, window=12) as session:
            for number in [*history, *range(20, 34)]:
                session.append(note(number))
            answer = session.ask(QUERY, max_new_tokens=1)
            newest = session.documents[-1].tokens
            found.add(session.next_token_logits(QUERY).numpy().tobytes())
    assert len(found) == 1
    assert answer.usage.reused > 0
    assert answer.usage.recomputed == 0
    assert answer.usage.computed > newest


@pytest.mark.parametrize("conditioning", [*HISTORICAL, "stream:2"])
def test_without_it_the_same_prompt_has_other_answers(
    llama_engine: TransformersHost, conditioning: str
) -> None:
    assert len(logits_after(llama_engine, conditioning, HISTORIES)) > 1


@pytest.mark.parametrize("conditioning", [*HISTORICAL, "stream:2"])
def test_the_contract_refuses_what_breaks_it(llama_engine: TransformersHost, conditioning: str) -> None:
    with pytest.raises(ConfigError, match=r"depend on what came before; pass deterministic=False"):
        RollingSession.open(model=llama_engine, conditioning=conditioning)
    with pytest.raises(ConfigError, match="how far it came"):
        RollingSession.open(model=llama_engine, preroll="auto")


@pytest.mark.parametrize("conditioning", CONTRACT)
def test_order_and_grouping_of_ingestion_decide_nothing(
    llama_engine: TransformersHost, tmp_path: Path, conditioning: str
) -> None:
    """One by one, all at once, lazily, from a store that another session filled in another order."""
    texts = [note(n) for n in (3, 4, 5, 6)]
    found = set()
    for order in list(permutations(texts))[::5]:
        with opened(llama_engine, conditioning, store=tmp_path / "store") as session:
            session.extend(order)
    for options in ({}, {"ingest": "lazy"}, {"store": tmp_path / "store"}, {"store": tmp_path / "new"}):
        with opened(llama_engine, conditioning, **options) as session:
            session.extend(texts)
            found.add(session.next_token_logits(QUERY).numpy().tobytes())
        with opened(llama_engine, conditioning, **options) as session:
            for text in texts:
                session.append(text)
            found.add(session.next_token_logits(QUERY).numpy().tobytes())
    assert len(found) == 1


def test_everything_before_it_is_the_full_prefill(tiny_engine: TransformersHost) -> None:
    with opened(tiny_engine, "full") as session:
        for number in range(7):
            session.append(note(number))
        answer = session.ask(QUERY, max_new_tokens=1)
        ids = session.prompt_token_ids(QUERY)
        logits = session.next_token_logits(QUERY)
    assert (answer.usage.reused, answer.usage.recomputed) == (0, 0)
    torch.testing.assert_close(logits, stock_logits(tiny_engine, ids)[-1], atol=2e-3, rtol=2e-3)


def test_the_stream_is_seen_beyond_the_window(llama_engine: TransformersHost) -> None:
    """The oldest document still knows the two that were evicted before it; `window:k` forgets them."""
    with opened(llama_engine, "stream:2") as session:
        for number in range(6):
            session.append(note(number))
        after = [len(one.computed_after) for one in session.provenance()]
        grown = session.evict(session.documents[0].id).computed
    assert after == [0, 3, 3, 3, 3]
    assert grown == 0, "what is left has seen the same stream"
    with opened(llama_engine, "window:2") as session:
        for number in range(6):
            session.append(note(number))
        assert [len(one.computed_after) for one in session.provenance()] == [0, 1, 2, 3, 3]


def test_what_a_document_is_computed_after_is_the_left_edge_of_a_later_window(
    llama_engine: TransformersHost, tmp_path: Path
) -> None:
    """So losing the oldest computes nothing, and a new document only itself and the two before it."""
    options: dict[str, object] = {"window": None, "store": tmp_path, "deterministic": True}
    with opened(llama_engine, "window:2", **options) as session:
        session.extend([note(n) for n in range(6)])
        for number in range(6, 12):
            assert session.evict(session.documents[0].id).computed == 0
            added = session.append(note(number)).computed
            assert added == sum(document.tokens for document in session.documents[-3:])
    with opened(llama_engine, "window:2", **options) as session:
        assert sum(one.computed for one in session.extend([note(n) for n in range(8, 12)])) == 0


@pytest.mark.parametrize("conditioning", HISTORICAL)
def test_a_new_document_is_computed_in_the_prompt_and_reused_from_it(
    llama_engine: TransformersHost, conditioning: str
) -> None:
    """With nothing reused a fused prompt is a full prefill, and so is the KV that is taken from it."""
    with opened(llama_engine, conditioning, policy="direct-reuse", window=3) as session:
        session.extend([note(n) for n in range(3)])
        first = session.ask(QUERY, max_new_tokens=1)
        ids, context = session.prompt_token_ids(QUERY), session.prompt(QUERY).context
        full = session.next_token_logits(QUERY, policy="full-prefill")
        torch.testing.assert_close(session.next_token_logits(QUERY), full, atol=1e-4, rtol=1e-4)
        session.append(note(7))
        second = session.ask(QUERY, max_new_tokens=1)
        history = session._history
        assert history is not None
        kept = history[session._planner.fused_keys(session.prompt(QUERY))[context[2].name]]
        made = {one.name: one.made for one in session.provenance()}
    documents = sum(len(segment.token_ids) for segment in context[1:])
    assert first.usage.computed == documents + len(ids) - context[-1].stop
    assert second.usage.reused == documents - len(context[1].token_ids)
    assert set(made.values()) == {"prefilled", "fused"}
    for layer, (keys, values) in enumerate(stock_kv(llama_engine, ids)):
        at = slice(context[2].start, context[2].stop)
        if conditioning == "first-seen":  # written back, it lies where the second prompt had it
            torch.testing.assert_close(kept.k[layer], keys[:, at], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(kept.v[layer], values[:, at], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("conditioning", HISTORICAL)
@pytest.mark.parametrize("policy", ["token-topk", "token-topk-gradual", "prophetkv", "fusionrag", "epic"])
def test_policies_choose_around_documents_without_kv(
    llama_engine: TransformersHost, conditioning: str, policy: str
) -> None:
    """A new document in the middle of the prompt: what is chosen lies in the others, and adds up."""
    with opened(llama_engine, conditioning, policy=policy, ratio=0.3, window=5) as session:
        session.extend([note(n) for n in range(4)], ids=["a", "b", "c", "d"])
        session.ask(QUERY, max_new_tokens=1)
        session.replace("b", note(8))
        answer = session.ask(QUERY, max_new_tokens=1)
        segments = {s.name: range(s.start, s.stop) for s in session.prompt(QUERY).segments}
    reusable = [position for name in "acd" for position in segments[name]]
    assert set(answer.trace.selected) <= set(reusable)
    assert answer.usage.recomputed == int(0.3 * len(reusable))
    assert answer.usage.computed == len(segments["b"]) + len(segments["query"])


def test_anchors_are_refused_where_there_are_none(llama_engine: TransformersHost) -> None:
    with opened(llama_engine, "first-seen") as session:
        session.append(note(1))
        with pytest.raises(ConfigError, match="prophetkv"):
            session.ask(QUERY, policy="qcfuse")
        assert session.ask(QUERY, max_new_tokens=1).text is not None


@pytest.mark.parametrize("conditioning", ["isolated", "window:1"])
def test_a_fresh_tail_is_a_rule_about_the_prompt(llama_engine: TransformersHost, conditioning: str) -> None:
    """The newest documents are computed in the call whether or not an earlier one had stored their KV."""
    found = set()
    for tail_before in (0, 2):
        with opened(llama_engine, conditioning, fresh_tail=tail_before) as session:
            session.extend([note(n) for n in range(4)])
            session.ask(QUERY, max_new_tokens=1)
        with opened(llama_engine, conditioning, fresh_tail=2, ratio=0.2) as session:
            session.extend([note(n) for n in range(4)])
            answer = session.ask(QUERY, max_new_tokens=1)
            segments = session.prompt(QUERY).segments
            found.add(session.next_token_logits(QUERY).numpy().tobytes())
            all_recomputed = session.next_token_logits(QUERY, ratio=1.0)
            full = session.next_token_logits(QUERY, policy="full-prefill")
    assert answer.usage.computed == sum(len(segment.token_ids) for segment in segments[3:])
    assert len(found) == 1
    torch.testing.assert_close(all_recomputed, full, atol=1e-4, rtol=1e-4)


def test_batches_are_evicted_at_once_and_exact(llama_engine: TransformersHost) -> None:
    with opened(llama_engine, "full", eviction="batch:3", window=4) as session:
        evicted, computed, sizes = [], [], []
        for number in range(13):
            change = session.append(note(number))
            evicted.append(len(change.evicted))
            computed.append(change.computed)
            sizes.append(len(session.documents))
        assert session.check_integrity() == []
        full = session.next_token_logits(QUERY, policy="full-prefill")
        torch.testing.assert_close(session.next_token_logits(QUERY), full, atol=1e-4, rtol=1e-4)
    assert sizes == [1, 2, 3, 4, 5, 6, 4, 5, 6, 4, 5, 6, 4]
    assert evicted == [0, 0, 0, 0, 0, 0, 3, 0, 0, 3, 0, 0, 3]
    one = computed[4]
    assert all(abs(computed[n] - one) <= 1 for n in (1, 2, 3, 5, 7, 8, 10, 11)), (
        "growing costs the new document"
    )
    assert all(computed[n] > 3 * one for n in (6, 9, 12)), "a batch costs the whole window"
    with pytest.raises(ConfigError, match=r"batch:b"):
        opened(llama_engine, "full", eviction="batch:0")
