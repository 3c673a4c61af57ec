"""A session against the stock forward, and against itself: usage, determinism, restarts, bad input."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolling_kv import Answer, RollingSession
from rolling_kv.call import placed_segments
from rolling_kv.engine.host import TransformersHost
from rolling_kv.errors import (
    ConfigError,
    DuplicateDocumentError,
    EmptyDocumentError,
    InvalidRatioError,
    NumericsError,
    PromptTooLongError,
    SessionClosedError,
    StoreFullError,
    StoreModelMismatchError,
    UnknownConditioningError,
    UnknownDocumentError,
    UnknownPolicyError,
)
from rolling_kv.policies import POLICIES, create_policy
from rolling_kv.signals import Signals
from tests.engine.stock import stock_logits
from tests.settings import REPAIRING
from tests.tiny_models import tiny_model, tiny_tokenizer

INSTRUCTION = "Answer from the notes."
QUERY = "Which number did note 3 say?"
MODES = ("isolated", "instruction", "window:1", "window:3")


def note(number: int) -> str:
    return f"Note {number} of the day says {number * 7919 % 1000}."


def open_session(engine: TransformersHost, **options: object) -> RollingSession:
    options = REPAIRING | {"instruction": INSTRUCTION, "window": 6} | options
    return RollingSession.open(model=engine, **options)  # type: ignore[arg-type]


def partition(answer: Answer) -> int:
    usage = answer.usage
    return usage.prefix + usage.reused + usage.recomputed + usage.computed


@pytest.mark.parametrize("conditioning", MODES)
@pytest.mark.parametrize("policy", ["document-aligned", "token-topk"])
def test_ratio_one_is_the_stock_forward(
    tiny_engine: TransformersHost, conditioning: str, policy: str
) -> None:
    with open_session(tiny_engine, conditioning=conditioning, policy=policy) as session:
        session.extend([note(n) for n in range(9)])
        ids = session.prompt_token_ids(QUERY)
        reference = stock_logits(tiny_engine, ids)[-1]
        fused = session.next_token_logits(QUERY, ratio=1.0)
        full = session.next_token_logits(QUERY, policy="full-prefill")
        assert not torch.allclose(session.next_token_logits(QUERY, ratio=0.0), reference, atol=1e-3)
    torch.testing.assert_close(fused, reference, atol=1e-4, rtol=0)
    torch.testing.assert_close(full, reference, atol=1e-4, rtol=0)


@pytest.mark.parametrize("policy", ["document-aligned", "token-topk"])
def test_error_to_full_prefill_does_not_rise_with_the_ratio(
    tiny_engine: TransformersHost, policy: str
) -> None:
    """Mean squared error of the logits over eight windows, isolated, at ratios 0, 0.25, 0.5 and 1."""
    errors = torch.zeros(4, dtype=torch.float64)
    with open_session(tiny_engine, conditioning="isolated", policy=policy) as session:
        session.extend([note(n) for n in range(5)])
        for step in range(8):
            session.append(note(5 + step))
            reference = session.next_token_logits(QUERY, policy="full-prefill").double()
            for index, ratio in enumerate((0.0, 0.25, 0.5, 1.0)):
                logits = session.next_token_logits(QUERY, ratio=ratio).double()
                errors[index] += (logits - reference).square().mean()
    assert errors[-1] < 1e-8
    assert bool((errors.diff() <= 0).all()), errors.tolist()


@pytest.mark.parametrize("conditioning", MODES)
@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.1, 0.33, 1.0])
def test_usage_partitions_the_prompt(llama_engine: TransformersHost, conditioning: str, ratio: float) -> None:
    with open_session(llama_engine, conditioning=conditioning) as session:
        session.extend([note(n) for n in range(8)])
        answer = session.ask(QUERY, ratio=ratio, max_new_tokens=3)
        usage = answer.usage
        reusable = usage.reused + usage.recomputed
        assert partition(answer) == usage.prompt_tokens == len(session.prompt_token_ids(QUERY))
        assert usage.recomputed == (0 if ratio == 0 else max(1, int(ratio * reusable)))
        assert usage.recomputed == len(answer.trace.selected) == answer.trace.selection.k
        assert usage.computed == len(session.prompt(QUERY).segments[-1].token_ids)
        assert usage.ingested == 0
        assert usage.degraded == ()
        assert usage.output == len(answer.token_ids)
        lengths = [len(segment.token_ids) for segment in session.prompt(QUERY).context]
        exact = {"isolated": 1, "instruction": 2, "window:1": 3, "window:3": 5}[conditioning]
        assert usage.prefix == sum(lengths[:exact])
        assert all(usage.prefix <= position < usage.prefix + reusable for position in answer.trace.selected)


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"full-prefill", "direct-reuse"}))
def test_every_policy_recomputes_exactly_k_and_does_not_look_at_history(
    llama_engine: TransformersHost, tmp_path: Path, policy: str
) -> None:
    fingerprints = set()
    for store, start in ((None, 2), (tmp_path, 0), (tmp_path, 1)):
        with open_session(llama_engine, policy=policy, ratio=0.2, store=store) as session:
            for number in range(start, 8):
                session.append(note(number))
                if number % 3 == 0:
                    session.ask(QUERY, max_new_tokens=1)
            answer = session.ask(QUERY, max_new_tokens=1)
        usage = answer.usage
        assert partition(answer) == usage.prompt_tokens
        assert usage.recomputed == int(0.2 * (usage.reused + usage.recomputed)) == len(answer.trace.selected)
        assert list(answer.trace.selected) == sorted(set(answer.trace.selected))
        assert usage.prefix <= answer.trace.selected[0]
        assert answer.trace.selected[-1] < usage.prompt_tokens - usage.computed
        assert bool(usage.degraded) == policy.startswith(("qcfuse", "sink")), "layers and sinks are not known"
        assert 1 <= answer.trace.selection.segments <= usage.recomputed
        fingerprints.add((answer.trace.logits_fingerprint, answer.trace.selected))
    assert len(fingerprints) == 1


def test_direct_reuse_and_full_prefill_account_for_themselves(llama_engine: TransformersHost) -> None:
    with open_session(llama_engine) as session:
        session.extend([note(n) for n in range(8)])
        direct = session.ask(QUERY, policy="direct-reuse", max_new_tokens=1)
        full = session.ask(QUERY, policy="full-prefill", max_new_tokens=1)
    assert direct.usage.recomputed == 0
    assert partition(direct) == direct.usage.prompt_tokens
    assert full.usage.computed == full.usage.prompt_tokens
    assert full.trace.lineages == ()


def test_timing_adds_up(llama_engine: TransformersHost) -> None:
    with open_session(llama_engine) as session:
        session.extend([note(n) for n in range(8)])
        timing = session.ask(QUERY, max_new_tokens=4).timing
    phases = (timing.ingest, timing.load, timing.select, timing.fuse, timing.first_token)
    assert min(phases) >= 0.0
    assert sum(phases) <= timing.ttft <= timing.total


# --- histories
# -----------------------------------------------------------------------------------------------

operation = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 9)),
    st.tuples(st.just("evict"), st.integers(0, 5)),
    st.tuples(st.just("replace"), st.integers(0, 5), st.integers(0, 9)),
    st.tuples(st.just("ask"), st.sampled_from([0.0, 0.2])),
)


def run(session: RollingSession, operations: list[tuple[object, ...]]) -> None:
    for kind, *arguments in operations:
        held = session.documents
        if kind == "append":
            session.append(note(int(arguments[0])))  # type: ignore[call-overload]
        elif kind == "ask":
            session.ask(QUERY, ratio=arguments[0], max_new_tokens=1)  # type: ignore[arg-type]
        elif held:
            document = held[int(arguments[0]) % len(held)].id  # type: ignore[call-overload]
            if kind == "evict":
                session.evict(document)
            else:
                session.replace(document, note(int(arguments[1])))  # type: ignore[call-overload]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    history=st.lists(operation, max_size=8),
    final=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    conditioning=st.sampled_from(MODES),
    lazy=st.booleans(),
    on_disk=st.booleans(),
)
def test_the_same_window_gives_the_same_bits_after_any_history(
    llama_engine: TransformersHost,
    tmp_path_factory: pytest.TempPathFactory,
    history: list[tuple[object, ...]],
    final: list[int],
    conditioning: str,
    lazy: bool,
    on_disk: bool,
) -> None:
    """One session sees only the final window, at once; the other comes to it after `history`, one by one."""
    texts = [note(number) for number in final]
    with open_session(llama_engine, conditioning=conditioning) as fresh:
        fresh.extend(texts)
        expected = fresh.next_token_logits(QUERY)
        answer = fresh.ask(QUERY, max_new_tokens=3)
    folder = tmp_path_factory.mktemp("store") if on_disk else None
    ingest = "lazy" if lazy else "eager"
    with open_session(llama_engine, conditioning=conditioning, store=folder, ingest=ingest) as aged:
        run(aged, history)
        for document in aged.documents:
            aged.evict(document.id)
        for text in texts:
            aged.append(text)
        assert torch.equal(aged.next_token_logits(QUERY), expected)
        again = aged.ask(QUERY, max_new_tokens=3)
        assert again.token_ids == answer.token_ids
        assert again.trace.logits_fingerprint == answer.trace.logits_fingerprint
        assert again.trace.lineages == answer.trace.lineages
        assert aged.check_integrity() == []


def test_another_window_gives_other_bits(llama_engine: TransformersHost) -> None:
    """The control of the property above: it can fail."""
    with open_session(llama_engine) as session:
        session.extend([note(n) for n in range(4)])
        first = session.next_token_logits(QUERY)
        session.replace(session.documents[0].id, note(9))
        assert not torch.equal(session.next_token_logits(QUERY), first)


def test_conditioning_follows_the_window(llama_engine: TransformersHost) -> None:
    """A document that comes to stand at the left edge is computed again, after less; in the middle it is
    not."""
    with open_session(llama_engine, conditioning="window:2", window=5) as session:
        session.extend([note(n) for n in range(5)])
        before = session.ask(QUERY, max_new_tokens=1).trace.lineages
        session.append(note(5))
        after = session.ask(QUERY, max_new_tokens=1).trace.lineages
    assert before[0] == after[0], "the instruction"
    assert before[4:6] == after[3:5], "documents with both neighbours still before them"
    assert set(before[2:4]).isdisjoint(after[1:3]), "documents that lost a neighbour"


def test_a_new_document_in_the_middle_costs_only_itself(llama_engine: TransformersHost) -> None:
    with open_session(llama_engine, conditioning="isolated", window=5) as session:
        session.extend([note(n) for n in range(4)])
        change = session.replace(session.documents[1].id, note(8))
        assert change.computed == session.documents[1].tokens


def test_the_same_text_twice_is_computed_once_and_stands_twice(llama_engine: TransformersHost) -> None:
    with open_session(llama_engine, conditioning="isolated") as session:
        first = session.append(note(1))
        second = session.append(note(1))
        assert first.document_id != second.document_id
        assert second.computed == 0
        answer = session.ask(QUERY, max_new_tokens=1)
        assert answer.trace.lineages[1] == answer.trace.lineages[2]
        ids = session.prompt_token_ids(QUERY)
        full = session.next_token_logits(QUERY, ratio=1.0)
    torch.testing.assert_close(full, stock_logits(llama_engine, ids)[-1], atol=1e-4, rtol=0)


def test_the_same_question_twice_has_equal_logits_and_computes_nothing_new(
    llama_engine: TransformersHost,
) -> None:
    with open_session(llama_engine, ingest="lazy") as session:
        session.extend([note(n) for n in range(6)])
        first = session.ask(QUERY, max_new_tokens=2)
        second = session.ask(QUERY, max_new_tokens=2)
    assert first.usage.ingested > 0
    assert second.usage.ingested == 0
    assert first.trace.logits_fingerprint == second.trace.logits_fingerprint


def test_reuse_does_not_decay_over_a_long_stream(llama_engine: TransformersHost) -> None:
    with open_session(llama_engine, conditioning="window:1", window=4) as session:
        costs, shares = [], []
        for number in range(30):
            costs.append(session.append(f"{number:03d} is the number of this note.").computed)
            usage = session.ask(QUERY, ratio=0.1, max_new_tokens=1).usage
            shares.append(usage.computed / usage.prompt_tokens)
    assert len(set(costs[6:])) == 1, costs
    assert len(set(shares[6:])) == 1, shares


def test_windows_of_changing_length_leave_nothing_behind(llama_engine: TransformersHost) -> None:
    def logits(texts: list[str]) -> torch.Tensor:
        with open_session(llama_engine) as session:
            session.extend(texts)
            return session.next_token_logits(QUERY)

    long, short = [note(n) * 4 for n in range(6)], [note(1)]
    first = logits(long)
    logits(short)
    assert torch.equal(logits(long), first)


# --- the store
# -------------------------------------------------------------------------------------------------


def test_after_a_restart_nothing_is_computed_again(llama_folder: Path, tmp_path: Path) -> None:
    def pass_by() -> tuple[int, str]:
        with RollingSession.open(
            model=llama_folder, instruction=INSTRUCTION, window=5, store=tmp_path, dtype="float32"
        ) as session:
            computed = sum(session.append(note(n)).computed for n in range(8))
            return computed, session.ask(QUERY, max_new_tokens=2).trace.logits_fingerprint

    first, second = pass_by(), pass_by()
    assert first[0] > 0
    assert second == (0, first[1])


@pytest.mark.parametrize("ingest", ["eager", "lazy"])
def test_a_damaged_payload_is_recomputed_and_reported(
    llama_engine: TransformersHost, tmp_path: Path, ingest: str
) -> None:
    texts = [note(n) for n in range(4)]
    with open_session(llama_engine, store=tmp_path) as session:
        session.extend(texts)
        fingerprint = session.ask(QUERY, max_new_tokens=1).trace.logits_fingerprint
    damaged = sorted(tmp_path.glob("segments/*/*.safetensors"))[0]
    damaged.write_bytes(damaged.read_bytes()[:-3] + b"xyz")
    with open_session(llama_engine, store=tmp_path, ingest=ingest) as session:
        session.extend(texts)
        answer = session.ask(QUERY, max_new_tokens=1)
        assert session.ask(QUERY, max_new_tokens=1).usage.degraded == ()
        assert session.check_integrity() == []
    assert len(answer.usage.degraded) == 1
    assert "checksum" in answer.usage.degraded[0]
    assert "quarantine" in answer.usage.degraded[0]
    assert answer.trace.logits_fingerprint == fingerprint
    assert (tmp_path / "quarantine" / damaged.name).exists()


def test_namespaces_share_nothing(llama_engine: TransformersHost, tmp_path: Path) -> None:
    with open_session(llama_engine, store=tmp_path, namespace="a") as first:
        assert first.append(note(1)).computed > 0
    with open_session(llama_engine, store=tmp_path, namespace="b") as second:
        assert second.append(note(1)).computed > 0
    with open_session(llama_engine, store=tmp_path, namespace="a") as third:
        assert third.append(note(1)).computed == 0


def test_a_store_of_another_model_is_refused(llama_engine: TransformersHost, tmp_path: Path) -> None:
    open_session(llama_engine, store=tmp_path).close()
    other = TransformersHost(tiny_model("llama", seed=5), tiny_tokenizer(), name="tiny-other")
    with pytest.raises(StoreModelMismatchError, match=r"'tiny-llama'.*'tiny-other'.*namespace="):
        open_session(other, store=tmp_path)


def test_a_full_disk_leaves_the_window_as_it_was(
    llama_engine: TransformersHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import os

    with open_session(llama_engine, store=tmp_path) as session:
        session.append(note(1), id="first")
        with monkeypatch.context() as patch:
            patch.setattr(
                os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left"))
            )
            with pytest.raises(StoreFullError, match="Free some space"):
                session.append(note(2), id="second")
        assert [document.id for document in session.documents] == ["first"]
        assert session.check_integrity() == []
        session.append(note(2), id="second")
        assert session.ask(QUERY, max_new_tokens=1).usage.degraded == ()


def test_two_sessions_on_one_store_at_once_lose_nothing(
    llama_engine: TransformersHost, tmp_path: Path
) -> None:
    errors: list[BaseException] = []

    def stream(offset: int) -> None:
        try:
            with open_session(llama_engine, store=tmp_path, window=4) as session:
                for number in range(8):
                    session.append(note(number + offset))
                    session.ask(QUERY, max_new_tokens=1)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=stream, args=(offset,)) for offset in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    with open_session(llama_engine, store=tmp_path, window=4) as session:
        assert session.check_integrity() == []
        assert sum(session.append(note(number)).computed for number in range(10)) == 0


# --- bad input
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings_given", "error", "says"),
    [
        ({"policy": "magic"}, UnknownPolicyError, "Known ones: .*token-topk"),
        ({"conditioning": "window:0"}, UnknownConditioningError, "window:k"),
        ({"conditioning": "fully"}, UnknownConditioningError, "isolated, instruction"),
        ({"ratio": 1.5}, InvalidRatioError, "from 0 .* to 1"),
        ({"ratio": -0.1}, InvalidRatioError, "from 0 .* to 1"),
        ({"ratio": float("nan")}, InvalidRatioError, "from 0 .* to 1"),
        ({"ratio": "much"}, InvalidRatioError, "from 0 .* to 1"),
        ({"window": 0}, ConfigError, "at least 1"),
        ({"window": 2.5}, ConfigError, "window = 2.5"),
        ({"window_tokens": -1}, ConfigError, "at least 1"),
        ({"ingest": "never"}, ConfigError, "eager"),
        ({"namespace": ""}, ConfigError, "namespace"),
        ({"selection_layer": 0}, ConfigError, "at least 1"),
        ({"selection_layer": 6}, ConfigError, "layers 1 to 5"),
    ],
)
def test_settings_that_are_not_as_expected(
    llama_engine: TransformersHost, settings_given: dict[str, object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        open_session(llama_engine, **settings_given)


def test_calls_that_are_not_as_expected_leave_the_session_usable(llama_engine: TransformersHost) -> None:
    with open_session(llama_engine) as session:
        session.append(note(1), id="one")
        with pytest.raises(EmptyDocumentError, match="white space"):
            session.append(" \n\t")
        with pytest.raises(EmptyDocumentError):
            session.extend([note(2), ""])
        with pytest.raises(TypeError, match="bytes"):
            session.append(b"bytes")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="list of texts"):
            session.extend("text")
        with pytest.raises(DuplicateDocumentError, match="replace"):
            session.append(note(2), id="one")
        with pytest.raises(UnknownDocumentError, match="one"):
            session.evict("two")
        with pytest.raises(ConfigError, match="query is empty"):
            session.ask("  ")
        with pytest.raises(UnknownPolicyError):
            session.ask(QUERY, policy="magic")
        with pytest.raises(InvalidRatioError):
            session.ask(QUERY, ratio=2)
        for count in (0, -5, -500):
            with pytest.raises(ConfigError, match="max_new_tokens"):
                session.ask(QUERY, max_new_tokens=count)
        assert [document.id for document in session.documents] == ["one"]
        assert session.ask(QUERY, max_new_tokens=1).usage.output == 1


def test_a_prompt_longer_than_the_model_says_what_would_fit(llama_engine: TransformersHost) -> None:
    with open_session(llama_engine, window=None, ingest="lazy") as session:
        session.extend([note(n) * 8 for n in range(12)])
        with pytest.raises(PromptTooLongError, match=r"2048 positions.*newest (\d+) would fit") as caught:
            session.ask(QUERY, max_new_tokens=10)
        fitting = int(str(caught.value).split("newest ")[1].split()[0])
        held = session.documents
        for document in held[: len(held) - fitting - 1]:
            session.evict(document.id)
        with pytest.raises(PromptTooLongError):
            session.ask(QUERY, max_new_tokens=10)
        session.evict(session.documents[0].id)
        assert session.ask(QUERY, max_new_tokens=10).usage.prompt_tokens <= 2038


def test_a_closed_session_says_so(llama_engine: TransformersHost) -> None:
    session = open_session(llama_engine)
    session.close()
    session.close()
    with pytest.raises(SessionClosedError, match="Open a new one"):
        session.append(note(1))


# --- streaming
# ------------------------------------------------------------------------------------------------


def test_a_stream_is_the_answer_in_pieces(llama_engine: TransformersHost) -> None:
    with open_session(llama_engine) as session:
        session.extend([note(n) for n in range(4)])
        asked = session.ask(QUERY, max_new_tokens=12)
        stream = session.stream(QUERY, max_new_tokens=12)
        session.append(note(7))  # the prompt of the stream is fixed
        pieces = list(stream)
    assert "".join(pieces) == stream.answer.text == asked.text
    assert stream.answer.token_ids == asked.token_ids
    assert stream.answer.usage == asked.usage


def test_asking_by_full_prefill_decodes_as_ratio_one_does(tiny_engine: TransformersHost) -> None:
    with open_session(tiny_engine) as session:
        session.extend([note(n) for n in range(7)])
        full = session.ask(QUERY, policy="full-prefill", max_new_tokens=12)
        fused = session.ask(QUERY, ratio=1.0, max_new_tokens=12)
    assert full.token_ids == fused.token_ids


def test_a_session_without_documents_or_instruction_answers(llama_engine: TransformersHost) -> None:
    with open_session(llama_engine, instruction="") as session:
        usage = session.ask(QUERY, max_new_tokens=2).usage
        ids = session.prompt_token_ids(QUERY)
        logits = session.next_token_logits(QUERY)
    assert (usage.recomputed, usage.reused) == (0, 0)
    torch.testing.assert_close(logits, stock_logits(llama_engine, ids)[-1], atol=1e-4, rtol=0)


def test_the_name_of_a_model_decides_nothing(tmp_path: Path) -> None:
    for name, fresh in (("one", True), ("other", False)):
        engine = TransformersHost(tiny_model("llama"), tiny_tokenizer(), name=name)
        with open_session(engine, store=tmp_path) as session:
            assert (session.append(note(1)).computed > 0) == fresh
            assert session.ask(QUERY, max_new_tokens=1).usage.degraded == ()


def test_threads_that_share_an_engine_do_not_mix_up_special_tokens(llama_engine: TransformersHost) -> None:
    text = "a<|im_end|>b" * 20
    expected = {special: llama_engine.tokenizer.encode(text, special=special) for special in (True, False)}
    assert expected[True] != expected[False]
    wrong: list[bool] = []

    def encode(special: bool) -> None:
        for _ in range(300):
            if llama_engine.tokenizer.encode(text, special=special) != expected[special]:
                wrong.append(special)

    threads = [threading.Thread(target=encode, args=(special,)) for special in (True, False) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("selection_layer", [1, 3, 4, 5])
@pytest.mark.parametrize("inner", ["token-topk", "token-topk-gradual"])
def test_sinks_are_judged_by_stored_keys_whatever_ran_before(
    selection_layer: int, inner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrapped policy's pass may have gone deeper than the sink layer, and refreshed its keys."""
    engine = TransformersHost(tiny_model("llama"), tiny_tokenizer(), name="tiny-llama")
    blank = tiny_tokenizer()(" ")["input_ids"][0]
    traits = dataclasses.replace(engine.traits, sink_token_ids=frozenset({blank}), sink_layer=3)
    monkeypatch.setattr(engine, "traits", traits)
    with open_session(engine, conditioning="isolated", selection_layer=selection_layer) as session:
        session.extend([note(n) for n in range(6)])
        plan = session._planner.plan(session.prompt(QUERY))
        kv, _ = session._ingestor.ensure(plan.stored)
        stitched = engine.stitch(placed_segments(plan, kv), capacity=len(plan.prompt))
        signals = Signals(
            engine=engine,
            plan=plan,
            selection_layer=selection_layer,
            anchors=lambda: [],
            degraded=pytest.fail,
        )
        inner_need, sink_need = create_policy(f"sink-repair:{inner}").needs
        signals.score(inner_need, stitched=stitched, k=20)
        score = signals.score(sink_need, stitched=stitched, k=20)
    known = score[score > float("-inf")]
    assert len(known) == sum(plan.prompt.token_ids[p] == blank for p in plan.reusable_positions)
    assert float(known.min()) > 1e-3, "no stored key is compared with itself"


def test_numbers_that_are_none_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    engine = TransformersHost(model, tiny_tokenizer(), name="tiny-llama")
    with open_session(engine) as session:
        session.append(note(1))
        with torch.no_grad():
            model.lm_head.weight[5] = float("nan")
        for policy in ("direct-reuse", "full-prefill"):
            with pytest.raises(NumericsError, match="float32"):
                session.ask(QUERY, policy=policy)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_tokens": 5}, "max_new_tokens"),
        ({"temperature": None}, "temperature is None"),
        ({"top_p": "1"}, "top_p is 1"),
        ({"top_k": 0.5}, "top_k is 0.5"),
        ({"seed": None, "temperature": 1.0}, "seed is None"),
        ({"answer_prefix": None}, "answer_prefix is None"),
        ({"labels": None}, "labels is None"),
        ({"labels": [("a", 0)]}, "character after the last"),
        ({"selection_layer": True}, "layers 1 to 5"),
        ({"max_new_tokens": None}, "max_new_tokens is None"),
    ],
)
def test_options_that_are_not_as_expected(
    llama_engine: TransformersHost, options: dict[str, object], says: str
) -> None:
    with open_session(llama_engine) as session:
        session.append(note(1), id="a")
        with pytest.raises(ConfigError, match=says):
            session.ask(QUERY, **options)  # type: ignore[arg-type]


def test_no_anchors_are_the_query_alone(llama_engine: TransformersHost) -> None:
    with open_session(llama_engine, anchor_ratio=0.0, conditioning="isolated") as session:
        session.extend([note(n) for n in range(5)])
        assert session.ask(QUERY, policy="qcfuse", ratio=0.2, max_new_tokens=1).usage.recomputed > 0


def test_a_slide_finds_no_anchors_anew(llama_engine: TransformersHost) -> None:
    """They are the document's own, whatever it is conditioned on."""

    def rolled(policy: str) -> list[int]:
        with open_session(llama_engine, policy=policy, conditioning="window:2", window=5) as session:
            session.extend([note(n) for n in range(5)])
            return [session.append(note(n)).computed for n in range(5, 8)]

    lengths = []
    with open_session(llama_engine, conditioning="isolated") as session:
        for n in range(5, 8):
            session.append(note(n))
            lengths.append(2 * session.documents[-1].tokens)  # by itself, and its repetition
    expected = [plain + own for plain, own in zip(rolled("document-aligned"), lengths, strict=True)]
    assert rolled("qcfuse") == expected


def test_anchors_are_kept_with_every_lineage(llama_engine: TransformersHost, tmp_path: Path) -> None:
    options = {"policy": "qcfuse", "conditioning": "window:1", "store": tmp_path}
    with open_session(llama_engine, window=4, **options) as session:
        session.extend([note(n) for n in range(6)])
    with open_session(llama_engine, **options) as session:
        assert sum(one.computed for one in session.extend([note(n) for n in range(2, 6)])) == 0
