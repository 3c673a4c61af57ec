"""Fidelity against hand-computed figures and against what the session itself answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from rolling_kv import RollingSession
from rolling_kv.bench.fidelity import Arm, Reference, compare, labels_of, measure, reference_of
from rolling_kv.bench.requests import window_of
from rolling_kv.bench.statistics import share_of
from rolling_kv.engine.host import TransformersHost
from rolling_kv.errors import ConfigError, UnknownDocumentError
from rolling_kv.workloads import LABELLED, LabelledRequest


def needle(seed: int = 0, *, documents: int = 6) -> LabelledRequest:
    return next(LABELLED.create("needle")(seed, documents=documents))


def reference(logits: list[list[float]], *, tokens: int, ended: bool = False) -> Reference:
    return Reference(
        token_ids=tuple(range(tokens)),
        ended=ended,
        logits=torch.tensor(logits),
        text="",
        right=None,
        ttft=1.0,
        prompt_tokens=9,
    )


def test_comparing_is_its_definition() -> None:
    """Two tokens of an answer, probabilities (1/2, 1/2) and (3/4, 1/4) against (1/4, 3/4) and (3/4, 1/4)."""
    full = [[0.0, 0.0], [math.log(3.0), 0.0], [9.0, 0.0]]
    arm = torch.tensor([[0.0, math.log(3.0)], [math.log(3.0), 0.0], [0.0, 9.0]])
    same, kl = compare(reference(full, tokens=2), arm)
    assert same == [False, True]
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert kl == pytest.approx(expected / 2, rel=1e-6)  # float32 logits
    assert compare(reference(full, tokens=2, ended=True), arm)[0] == [False, True, False], "the end counts"


def test_wilson_interval() -> None:
    """8 of 10: the centre (p + z^2/2n) / (1 + z^2/n) and its half-width, by hand."""
    share = share_of([True] * 8 + [False] * 2)
    z = 1.959963984540054
    centre = (0.8 + z * z / 20) / (1 + z * z / 10)
    half = z * math.sqrt(0.8 * 0.2 / 10 + z * z / 400) / (1 + z * z / 10)
    assert (share.hits, share.count, share.share) == (8, 10, 0.8)
    assert (share.low, share.high) == (pytest.approx(centre - half), pytest.approx(centre + half))
    assert share_of([False] * 3).low == 0.0


def test_recomputing_everything_agrees_with_full_prefill(llama_engine: TransformersHost) -> None:
    request = needle()
    with window_of(llama_engine, request, conditioning="isolated", anchors=False) as session:
        full = reference_of(session, request, max_new_tokens=5)
        everything = measure(session, request, full, Arm("token-topk", 1.0))
        nothing = measure(session, request, full, Arm("direct-reuse", 0.0))
    assert len(full.token_ids) == full.compared == 5
    assert everything.agrees
    assert everything.top1 == 1.0
    assert everything.kl == pytest.approx(0.0, abs=1e-6)
    assert (everything.recall, everything.captured_deviation) == (1.0, pytest.approx(1.0))
    assert nothing.kl > 1e-3
    assert (nothing.recall, nothing.captured_deviation, nothing.k) == (0.0, 0.0, 0)


@pytest.mark.parametrize("policy", ["document-aligned", "epic", "qcfuse", "sink-repair:token-topk"])
def test_agreement_is_that_of_the_answers(llama_engine: TransformersHost, policy: str) -> None:
    """Teacher forcing says that the answers agree exactly when decoding gives the same answer."""
    seen = set()
    for seed, ratio in ((0, 0.1), (1, 0.4), (2, 0.98), (3, 0.99), (4, 1.0)):
        request = needle(seed)
        with window_of(llama_engine, request, conditioning="isolated", anchors=True) as session:
            full = reference_of(session, request, max_new_tokens=2)
            outcome = measure(session, request, full, Arm(policy, ratio))
            decoded = session.ask(
                request.query,
                answer_prefix=request.answer_prefix,
                policy=policy,
                ratio=ratio,
                max_new_tokens=2,
                stop="\n",
            )
        assert outcome.agrees == (decoded.token_ids == full.token_ids)
        seen.add(outcome.agrees)
    assert seen == {True, False}, "the samples hold both cases"


def test_recall_counts_the_tokens_of_the_labels(llama_engine: TransformersHost) -> None:
    """The tiny tokenizer has a token a byte, so that labels can be found by hand."""
    request = needle(4)
    with window_of(llama_engine, request, conditioning="isolated", anchors=False) as session:
        [(name, start, stop)] = labels_of(session, request)
        answer = session.ask(
            request.query, ratio=0.3, labels=[(name, start, stop)], policy="epic", max_new_tokens=1
        )
        segment = next(s for s in session.prompt(request.query).segments if s.name == name)
        text = next(d.text for d in session.documents if d.id == name)
        assert len(segment.token_ids) == len(text.encode()) + 1
    labelled = set(range(segment.start + start, segment.start + stop))
    hit = len(labelled & set(answer.trace.selected)) / len(labelled)
    assert answer.trace.selection.recall == pytest.approx(hit)
    assert 0 < hit < 1 or hit in (0, 1)


def test_labels_that_name_nothing_are_refused(llama_engine: TransformersHost) -> None:
    with RollingSession.open(model=llama_engine) as session:
        session.append("  Bob is here.", id="a")
        with pytest.raises(UnknownDocumentError, match="'b'"):
            session.ask("Who?", labels=[("b", 0, 1)])
        with pytest.raises(ConfigError, match="characters 3 to 40 of 'a', which has 14"):
            session.ask("Who?", labels=[("a", 3, 40)])
        inside = session.ask("Who?", labels=[("a", 2, 5)], policy="epic", ratio=0.3, max_new_tokens=1)
        before = session.ask("Who?", labels=[("a", 0, 2)], policy="epic", ratio=0.3, max_new_tokens=1)
    assert inside.trace.selection.recall is None, "the first document is exact prefix"
    assert before.trace.selection.recall is None, "white space before a document is not in the prompt"


def test_deviation_is_measured_whatever_the_policy(llama_engine: TransformersHost) -> None:
    request = needle(2)
    with window_of(llama_engine, request, conditioning="isolated", anchors=False) as session:
        plain = session.ask(request.query, policy="epic", ratio=0.3, max_new_tokens=1)
        measured = session.ask(
            request.query, policy="epic", ratio=0.3, max_new_tokens=1, measure_deviation=True
        )
        best = session.ask(request.query, policy="token-topk", ratio=0.3, max_new_tokens=1)
    assert plain.trace.selection.captured_deviation is None
    assert plain.trace.logits_fingerprint == measured.trace.logits_fingerprint, "measuring changes nothing"
    captured = measured.trace.selection.captured_deviation
    assert captured is not None
    assert best.trace.selection.captured_deviation is not None
    assert 0 < captured < best.trace.selection.captured_deviation, "the largest k capture the most"


@pytest.mark.parametrize(
    ("pieces", "count"),
    [
        (["1", "7", ".", "5", " or 17", "."], 5),  # 17 is none in 17.5
        (["The ", "17", " it is"], 2),
        (["17"], 1),
    ],
)
def test_a_reference_ends_with_the_answer(pieces: list[str], count: int) -> None:
    request = replace(needle(), expected="17")
    full = reference([[0.0, 1.0]] * len(pieces), tokens=len(pieces))
    right = replace(full, right=True)

    def decode(token_ids: Sequence[int]) -> str:
        return "".join(pieces[token] for token in token_ids)

    cut = right.answer_only(request, decode)
    assert len(cut.token_ids) == cut.compared == count
    assert cut.cut == (count < len(pieces))
    assert full.answer_only(request, decode) is full, "a wrong one is compared whole"


def test_an_arm_that_carries_the_answer_on_does_not_agree(
    llama_engine: TransformersHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is computed anew, so it says what full prefill says, behind the answer as well."""
    request = needle()
    with window_of(llama_engine, request, conditioning="isolated", anchors=False) as session:
        full = replace(reference_of(session, request, max_new_tokens=3), ended=False)
        begun = replace(full, token_ids=full.token_ids[:2], cut=True)
        same = measure(session, request, begun, Arm("token-topk", 1.0), stats=False)
        monkeypatch.setattr(LabelledRequest, "is_right", lambda *_: True)
        ended = measure(session, request, begun, Arm("token-topk", 1.0), stats=False)
    assert (same.top1, same.goes_on, same.agrees) == (1.0, True, False), "what it goes on to is not right"
    assert (ended.top1, ended.goes_on, ended.agrees) == (1.0, False, True)
