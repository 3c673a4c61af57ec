"""Pre-roll: exact answers after it, from a part of it, after a wrong guess, and making way for requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch

from rolling_kv import RollingSession
from rolling_kv.engine.host import PassInterrupted, TransformersHost
from rolling_kv.errors import ConfigError, SessionClosedError
from tests.settings import REPAIRING

INSTRUCTION = "Answer from the notes."
QUERY = "Which number did note 3 say?"


def note(number: int) -> str:
    return f"Note {number} of the day says {number * 7919 % 1000}."


def opened(engine: TransformersHost, preroll: str, **options: object) -> RollingSession:
    own = {"instruction": INSTRUCTION, "window": 4, "preroll": preroll, "deterministic": preroll != "auto"}
    return RollingSession.open(model=engine, **(REPAIRING | own | options))


def is_full(session: RollingSession) -> bool:
    full = session.next_token_logits(QUERY, policy="full-prefill")
    return torch.allclose(session.next_token_logits(QUERY), full, atol=1e-4, rtol=1e-4)


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came true")


def wait_for_preroll(session: RollingSession) -> None:
    wait_until(lambda: session._ingestor.held(session._predicted()) == len(session._predicted()))


def test_after_a_preroll_the_answer_is_full_prefills(tiny_engine: TransformersHost) -> None:
    with opened(tiny_engine, "auto", conditioning="isolated") as session:
        session.extend([note(n) for n in range(5)])
        assert not is_full(session)
        report = session.preroll()
        assert report.complete
        assert report.segments == 4, "the instruction and the three documents that stay"
        change = session.append(note(5))
        assert session.preroll().computed > 0  # before an answer begins one in the background
        assert session.preroll().computed == 0, "nothing is done twice"
        segments = session.prompt(QUERY).segments
        answer = session.ask(QUERY, max_new_tokens=2)
        full = session.ask(QUERY, max_new_tokens=2, policy="full-prefill")
    assert change.computed == len(segments[-2].token_ids), "only the new document"
    assert answer.usage.prefix == segments[-1].start
    assert answer.usage.computed == len(segments[-1].token_ids), "only the query"
    assert answer.trace.prerolled > 0
    assert answer.token_ids == full.token_ids


def test_a_part_of_a_preroll_is_a_longer_exact_prefix(llama_engine: TransformersHost) -> None:
    prefixes = []
    for steps in range(7):
        with opened(llama_engine, "auto", conditioning="window:1", window=7) as session:
            session.extend([note(n) for n in range(8)])
            for _ in range(steps):
                session._preroll_step()
            session.append(note(8))
            answer = session.ask(QUERY, max_new_tokens=1)
            prefixes.append(answer.usage.prefix)
            everything = session.next_token_logits(QUERY, ratio=1.0)
            full = session.next_token_logits(QUERY, policy="full-prefill")
            torch.testing.assert_close(everything, full, atol=1e-4, rtol=1e-4)
            assert answer.trace.selected == () or min(answer.trace.selected) >= answer.usage.prefix
    assert prefixes == sorted(prefixes)
    assert len(set(prefixes)) > 3, "every step makes it longer, until nothing but the query is left"


def test_a_wrong_guess_still_helps_up_to_where_it_is_right(llama_engine: TransformersHost) -> None:
    """Predicted: 1 2 3; the window becomes 1 2 9."""
    with opened(llama_engine, "auto", conditioning="isolated") as session:
        session.extend([note(n) for n in range(4)], ids=["0", "1", "2", "3"])
        assert session.preroll().complete
        session.replace("3", note(9))
        session.evict("0")
        answer = session.ask(QUERY, max_new_tokens=1)
        segments = session.prompt(QUERY).segments
    assert answer.usage.prefix >= segments[2].stop
    assert answer.usage.degraded == ()


def test_waiting_for_it_makes_every_answer_full_prefills(llama_engine: TransformersHost) -> None:
    """And so a function of the prompt alone, however far the pre-roll came."""
    found = set()
    for steps in range(4):
        with opened(llama_engine, "wait") as session:
            session.extend([note(n) for n in range(steps + 4)])
            for _ in range(steps):
                session._preroll_step()
            session.extend([note(n) for n in (11, 12, 13, 14)])
            assert is_full(session)
            found.add(session.next_token_logits(QUERY).numpy().tobytes())
    with opened(llama_engine, "off", conditioning="full") as session:
        session.extend([note(n) for n in (11, 12, 13, 14)])
        found.add(session.next_token_logits(QUERY).numpy().tobytes())
    assert len(found) == 1


def test_it_runs_in_the_background_after_an_answer(llama_engine: TransformersHost) -> None:
    with opened(llama_engine, "wait") as session:
        session.extend([note(n) for n in range(4)])
        session.ask(QUERY, max_new_tokens=2)
        wait_for_preroll(session)
        change = session.append(note(4))
        answer = session.ask(QUERY, max_new_tokens=2)
        assert is_full(session)
    assert change.computed < 60, "one document, not the window"
    assert answer.usage.ingested == 0
    names = [thread.name for thread in threading.enumerate()]
    assert "rolling-kv-preroll" not in names, "closing ends the thread"


def test_a_request_does_not_wait_for_a_segment_in_the_making(
    llama_engine: TransformersHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass is given up at its next layer; nothing of it is kept, and it is made again later."""
    with opened(llama_engine, "auto", conditioning="isolated") as session:
        session.extend([note(n) for n in range(4)])
        begun = threading.Event()
        real = session._ingestor.compute_ahead
        given_up = []

        def slow(paths: Any, *, interrupted: Callable[[], bool], report: Any) -> int:
            def looked() -> bool:
                begun.set()
                for _ in range(1000):  # a layer that takes long, or until somebody comes
                    if interrupted():
                        given_up.append(True)
                        return True
                    time.sleep(0.005)
                return False

            return real(paths, interrupted=looked, report=report)

        monkeypatch.setattr(session._ingestor, "compute_ahead", slow)
        session._background.start()
        assert begun.wait(5)
        started = time.perf_counter()
        session.append(note(9))
        assert time.perf_counter() - started < 4
        assert given_up
        monkeypatch.setattr(session._ingestor, "compute_ahead", real)
        assert session.preroll().complete


def test_memory_holds_one_window_and_one_guess(llama_engine: TransformersHost) -> None:
    with opened(llama_engine, "auto", window=3) as session:
        for number in range(12):
            session.append(note(number))
            session.ask(QUERY, max_new_tokens=1)
            session.preroll()
            held = session._ingestor
            assert len(held._resident) <= 4
            assert len(held._ahead) <= 3


def test_failures_in_the_background_are_told_with_the_next_answer(
    llama_engine: TransformersHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(llama_engine, "auto") as session:
        session.extend([note(n) for n in range(4)])
        with monkeypatch.context() as broken:
            broken.setattr(session._ingestor, "compute_ahead", lambda *_, **__: 1 / 0)
            session._background.start()
            wait_until(lambda: bool(session._unreported))
        answer = session.ask(QUERY, max_new_tokens=1)
    assert "The pre-roll failed: ZeroDivisionError" in answer.usage.degraded[0]


def test_it_is_refused_where_no_call_would_use_it(llama_engine: TransformersHost) -> None:
    with (
        opened(llama_engine, "off") as session,
        pytest.raises(ConfigError, match="preroll='slide' or 'wait'"),
    ):
        session.preroll()
    with pytest.raises(ConfigError, match="exclude each other"):
        opened(llama_engine, "auto", conditioning="first-seen")
    with pytest.raises(ConfigError, match="fresh_tail"):
        opened(llama_engine, "wait", fresh_tail=1)


def test_nothing_runs_in_the_background_while_an_answer_is_decoded(llama_engine: TransformersHost) -> None:
    with opened(llama_engine, "auto", conditioning="isolated") as session:
        session.extend([note(n) for n in range(4)])
        stream = session.stream(QUERY, max_new_tokens=8)
        next(stream)
        before = len(session._ingestor._ahead)
        session._background.start()
        time.sleep(0.3)
        assert len(session._ingestor._ahead) == before
        assert stream.answer.token_ids
        wait_for_preroll(session)


def test_a_session_closed_while_it_prerolls_ends(llama_engine: TransformersHost) -> None:
    """Also from a callback of the pre-roll itself, which holds the turn."""
    session = opened(llama_engine, "wait")
    session.extend([note(n) for n in range(4)])
    session._background.start()
    with pytest.raises(SessionClosedError):
        session.preroll(progress=lambda *_: session.close())
    assert session._background._thread is None


def test_what_a_preroll_made_is_stored_once_the_window_holds_it(
    llama_engine: TransformersHost, tmp_path: Path
) -> None:
    with opened(llama_engine, "wait", conditioning="window:1", store=tmp_path) as session:
        session.extend([note(n) for n in range(4)])
        session.preroll()
        session.append(note(4))
        leading = [one.key for one in session.provenance()[:3]]
    with opened(llama_engine, "off", conditioning="window:1", store=tmp_path) as session:
        session.extend([note(n) for n in range(1, 5)])
        assert [one.key for one in session.provenance()[:3]] == leading
        assert all(one.stored_at is not None for one in session.provenance()[:3])


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("bound", [{"window": 5}, {"window_tokens": 160}])
def test_the_prediction_is_what_an_append_leaves(
    llama_engine: TransformersHost, batch: int, bound: dict[str, int]
) -> None:
    settings = {"window": None, "eviction": f"batch:{batch}"} | bound
    with opened(llama_engine, "off", ingest="lazy", **settings) as session:
        for number in range(14):
            predicted = session._window.next_after_append()
            session.append(note(number % 10))
            assert session.documents[:-1] == predicted


@pytest.mark.parametrize("conditioning", ["isolated", "window:1", "window:2", "full"])
def test_a_slide_in_idle_time_changes_no_bit(tiny_engine: TransformersHost, conditioning: str) -> None:
    """What is left for the next call is the new document."""

    def rolled(preroll: str) -> tuple[list[bytes], list[int]]:
        logits, computed = [], []
        with opened(tiny_engine, preroll, conditioning=conditioning) as session:
            session.extend([note(n) for n in range(4)])
            for number in range(4, 8):
                if preroll == "slide":
                    assert session.preroll().complete
                    assert session.preroll().computed == 0, "nothing is done twice"
                change = session.append(note(number))
                computed.append(change.computed - session.documents[-1].tokens)
                logits.append(session.next_token_logits(QUERY).numpy().tobytes())
        return logits, computed

    plain, ahead = rolled("off"), rolled("slide")
    assert ahead[0] == plain[0]
    assert ahead[1] == [0, 0, 0, 0]
    assert all(tokens > 0 for tokens in plain[1]) == (conditioning != "isolated")


def test_a_slide_in_idle_time_computes_what_the_conditioning_does(llama_engine: TransformersHost) -> None:
    """The two that the new one is computed after; the two at the left edge are stored. No more is kept."""
    with opened(llama_engine, "slide", conditioning="window:2", window=6) as session:
        session.extend([note(n) for n in range(6)])
        expected = sum(document.tokens for document in session.documents[-2:])
        assert session.preroll().computed == expected
        assert len(session._ingestor._ahead) == 4
        session.ask(QUERY, max_new_tokens=1)
        assert session.preroll().computed == 0, "asking drops nothing of it"
        session.append(note(6))
        session._preroll_step()
        assert len(session._ingestor._ahead) <= 4


def test_a_slide_in_idle_time_takes_the_stream_along(llama_engine: TransformersHost) -> None:
    with opened(llama_engine, "slide", conditioning="stream:2", deterministic=False) as session:
        session.extend([note(n) for n in range(6)])
        session.preroll()
        assert session.append(note(6)).computed == session.documents[-1].tokens


def test_a_slide_runs_in_the_background_and_is_stored(llama_engine: TransformersHost, tmp_path: Path) -> None:
    with opened(llama_engine, "slide", conditioning="window:2", store=tmp_path, fresh_tail=1) as session:
        session.extend([note(n) for n in range(4)])
        session.ask(QUERY, max_new_tokens=1)
        wait_for_preroll(session)
        assert session.append(note(4)).computed == 0, "the newest document belongs to every call"
    with opened(llama_engine, "off", conditioning="window:2", store=tmp_path, fresh_tail=1) as session:
        session.extend([note(n) for n in range(1, 5)])
        assert all(one.stored_at is not None for one in session.provenance()[:4])


def test_damage_found_in_a_pass_that_is_given_up_is_told(
    llama_engine: TransformersHost, tmp_path: Path
) -> None:
    options: dict[str, object] = {"conditioning": "window:1", "store": tmp_path, "ingest": "lazy"}
    with opened(llama_engine, "off", **options) as session:
        session.extend([note(n) for n in range(4)])
        session.ask(QUERY, max_new_tokens=1)
    for payload in tmp_path.rglob("*.safetensors"):
        damaged = bytearray(payload.read_bytes())
        damaged[-1] ^= 1
        payload.write_bytes(damaged)
    with opened(llama_engine, "slide", **options) as session:
        session.extend([note(n) for n in range(4)])
        looks = chain([False, False], repeat(True))  # given up in the pass behind the failed load
        with pytest.raises(PassInterrupted):
            session._compute_ahead(session._predicted(), interrupted=lambda: next(looks))
        assert any("unusable" in reason for reason in session.ask(QUERY, max_new_tokens=1).usage.degraded)


def test_a_lazy_session_prepares_the_pending_call_first(llama_engine: TransformersHost) -> None:
    """And keeps, beside what is needed, no context of what is done."""
    with opened(llama_engine, "slide", conditioning="window:3", window=8, ingest="lazy") as session:
        session.extend([note(n) for n in range(8)])
        session.preroll()
        held = len(session._ingestor._ahead)
        assert session.ask(QUERY, max_new_tokens=1).usage.ingested == 0
        assert held == len({path[-1].key for path in session._predicted()})
        session.preroll()
        session.append(note(8))
        assert session.ask(QUERY, max_new_tokens=1).usage.ingested == session.documents[-1].tokens


def test_a_half_read_stream_does_not_hold_up_a_preroll(llama_engine: TransformersHost) -> None:
    with opened(llama_engine, "slide", conditioning="window:2") as session:
        session.extend([note(n) for n in range(4)])
        stream = session.stream(QUERY, max_new_tokens=8)
        next(stream)
        assert session.preroll().complete
        session._background.start()
        time.sleep(0.1)
        del stream  # left early: the next answer's pre-roll need not wait for the garbage collector
        assert not session._turns.occupied


def test_prerolls_do_not_interrupt_each_other(llama_engine: TransformersHost) -> None:
    """Two threads on one session, and the background threads of two sessions on one engine."""
    with (
        opened(llama_engine, "slide", conditioning="window:3", window=6) as session,
        opened(llama_engine, "slide", conditioning="window:2", window=6) as other,
    ):
        for one in (session, other):
            one.extend([note(n) * 6 for n in range(6)])
        other._background.start()
        with ThreadPoolExecutor(2) as pool:
            reports = [pool.submit(session.preroll) for _ in range(2)]
            assert all(report.result(timeout=60).complete for report in reports)
        wait_for_preroll(other)
        for one in (session, other):
            one.append(note(7) * 6)
            one._background.start()
        for one in (session, other):
            wait_for_preroll(one)


def test_what_is_stored_is_not_computed_ahead(llama_engine: TransformersHost, tmp_path: Path) -> None:
    options: dict[str, object] = {"conditioning": "window:2", "store": tmp_path, "window": 6}
    with opened(llama_engine, "off", **options) as session:
        session.extend([note(n) for n in range(6)])
    with opened(llama_engine, "slide", ingest="lazy", **options) as session:
        session.extend([note(n) for n in range(6)])
        report = session.preroll()
        assert report.complete
        expected = sum(document.tokens for document in session.documents[-2:])
        assert report.computed == expected, "what the new one is computed after; the left edge is stored"
