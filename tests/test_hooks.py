"""Hooks: every event of a session, what it carries, and what happens when a function of the user's raises."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import xxhash

from rolling_kv import RollingSession
from rolling_kv.engine.host import TransformersHost
from rolling_kv.errors import AnswerUnfinishedError, ConfigError
from rolling_kv.hooks import (
    EVENTS,
    Answered,
    Fused,
    Planned,
    Selected,
    TokenChosen,
    WindowChanged,
    WindowChanging,
    observe_sessions,
)
from rolling_kv.store.memory import MemoryStore
from rolling_kv.window import ConversationLayout
from tests.engine.stock import stock_kv, stock_logits
from tests.settings import REPAIRING

QUERY = "Which number did note 3 say?"


def note(number: int) -> str:
    return f"Note {number} of the day says {number * 7919 % 1000}."


def opened(engine: TransformersHost, **options: Any) -> RollingSession:
    return RollingSession.open(
        model=engine, **(REPAIRING | {"instruction": "Answer.", "window": 4, "ratio": 0.2} | options)
    )


def recorded(session: RollingSession) -> list[Any]:
    seen: list[Any] = []
    for event in EVENTS:
        session.hooks.on(event, seen.append)  # type: ignore[type-var]  # each in its turn
    return seen


def test_a_call_is_seen_from_its_plan_to_its_answer(llama_engine: TransformersHost) -> None:
    with opened(llama_engine) as session:
        session.extend([note(n) for n in range(4)])
        seen = recorded(session)
        answer = session.ask(QUERY, max_new_tokens=3, answer_prefix="It is")
        plain = session.prompt(QUERY, answer_prefix="It is")
    names = [type(event).__name__ for event in seen]
    assert names == ["Planned", "Selected", "Fused", *["TokenChosen"] * 3, "Answered"]
    planned, selected, fused, *tokens, answered = seen
    assert len({id(event.call) for event in seen}) == 1
    assert planned.call.prompt == plain
    assert planned.call.options == {"max_new_tokens": 3, "answer_prefix": "It is"}
    assert [one.text for one in planned.call.documents] == [note(n) for n in range(4)]
    assert [part.lineage.key for part in planned.plan.stored] == list(answer.trace.lineages)
    assert selected.positions == answer.trace.selected
    assert selected.policy == "document-aligned"
    digest = xxhash.xxh3_128_hexdigest(fused.logits.numpy().tobytes())
    assert digest == answer.trace.logits_fingerprint
    assert [event.token_id for event in tokens] == list(answer.token_ids)
    assert answered.answer is answer


def test_margins_are_those_between_the_two_likeliest(llama_engine: TransformersHost) -> None:
    with opened(llama_engine) as session:
        session.extend([note(n) for n in range(4)])
        answer = session.ask(QUERY, max_new_tokens=4, policy="full-prefill")
        ids = session.prompt_token_ids(QUERY)
    expected = []
    for length in range(4):
        logits = stock_logits(llama_engine, ids + answer.token_ids[:length])[-1]
        largest, second = logits.sort(descending=True).values[:2].tolist()
        expected.append(largest - second)
    assert answer.trace.margins == pytest.approx(expected, abs=1e-4)
    json.dumps(answer.to_dict())


def test_fused_kv_is_what_full_prefill_has_where_all_is_recomputed(tiny_engine: TransformersHost) -> None:
    found: list[Any] = []

    def keep(event: Fused) -> None:
        assert event.kv is not None
        for segment in event.call.prompt.segments:
            found.append(
                (
                    segment,
                    [tuple(t.clone() for t in event.kv.segment(segment, n)) for n in range(event.kv.layers)],
                )
            )

    with opened(tiny_engine, ratio=1.0) as session:
        session.extend([note(n) for n in range(3)])
        with session.hooks.on(Fused, keep):
            session.next_token_logits(QUERY)
        session.next_token_logits(QUERY)
        ids = session.prompt_token_ids(QUERY)
    reference = stock_kv(tiny_engine, ids)
    assert len(found) == 5
    for segment, layers in found:
        for (keys, values), (stock_keys, stock_values) in zip(layers, reference, strict=True):
            torch.testing.assert_close(keys, stock_keys[:, segment.start : segment.stop], atol=1e-4, rtol=0)
            torch.testing.assert_close(
                values, stock_values[:, segment.start : segment.stop], atol=1e-4, rtol=0
            )


def test_a_continuation_is_scored_without_a_second_prefill(llama_engine: TransformersHost) -> None:
    events: list[Fused] = []
    with opened(llama_engine) as session:
        session.extend([note(n) for n in range(4)])
        given = (70, 71, 72)
        expected = session.score(QUERY, given).logits
        before = session.ask(QUERY, max_new_tokens=3)
        with session.hooks.on(Fused, events.append):
            after = session.ask(QUERY, max_new_tokens=3)
        kv = events[0].kv
        assert kv is not None
        torch.testing.assert_close(kv.following(given), expected[1:], atol=1e-4, rtol=0)
        with pytest.raises(ConfigError, match="4 tokens and the call has room for 3"):
            kv.following((1, 2, 3, 4))
        with session.hooks.on(Fused, lambda event: _follow(event, given)):
            meanwhile = session.ask(QUERY, max_new_tokens=3)
        session.ask(QUERY, max_new_tokens=1, policy="full-prefill")
    assert before.token_ids == after.token_ids == meanwhile.token_ids
    assert before.trace.margins == meanwhile.trace.margins


def _follow(event: Fused, token_ids: tuple[int, ...]) -> None:
    assert event.kv is not None
    event.kv.following(token_ids)


def test_full_prefill_has_no_fused_kv_and_no_selection(llama_engine: TransformersHost) -> None:
    with opened(llama_engine, policy="full-prefill") as session:
        session.append(note(1))
        seen = recorded(session)
        session.ask(QUERY, max_new_tokens=1)
        session.score(QUERY, (1,))
    assert [type(event).__name__ for event in seen] == (
        ["Planned", "Fused", "TokenChosen", "Answered", "Planned", "Fused"]
    )
    assert seen[1].kv is None
    assert [event.call.number for event in seen] == [0, 0, 0, 0, 1, 1]
    assert seen[-1].call.kind == "score"


CHANGES: dict[str, Callable[[RollingSession], object]] = {
    "append": lambda session: session.append(note(7)),
    "evict": lambda session: session.evict("1"),
    "replace": lambda session: session.replace("1", note(7)),
    "pin": lambda session: session.pin("1"),
    "unpin": lambda session: session.unpin("1"),
    "show": lambda session: session.show([note(1), note(7)], ids=["1", "7"]),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_every_change_is_seen_before_and_after(llama_engine: TransformersHost, kind: str) -> None:
    with opened(llama_engine) as session:
        session.extend([note(n) for n in range(4)], ids=[str(n) for n in range(4)])
        before = session.documents
        seen = recorded(session)
        told = CHANGES[kind](session)
        changing, changed = seen
        assert isinstance(changing, WindowChanging)
        assert isinstance(changed, WindowChanged)
        assert changing.kind == changed.kind == kind
        assert changing.before == changed.before == before
        assert changing.after == changed.after == session.documents
        assert changed.changes == (() if told is None else (told,))


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("event", [WindowChanging, WindowChanged])
@pytest.mark.parametrize("conditioning", ["window:2", "stream:2"])
def test_a_change_whose_hook_raises_did_not_happen(
    llama_engine: TransformersHost, kind: str, event: Any, conditioning: str
) -> None:
    deterministic = conditioning == "window:2"
    with opened(llama_engine, conditioning=conditioning, deterministic=deterministic) as session:
        session.extend([note(n) for n in range(4)], ids=[str(n) for n in range(4)])
        before, answer = session.documents, session.ask(QUERY, max_new_tokens=2)
        with session.hooks.on(event, _refuse), pytest.raises(PermissionError, match="no"):
            CHANGES[kind](session)
        assert session.documents == before
        again = session.ask(QUERY, max_new_tokens=2)
        assert again.trace.logits_fingerprint == answer.trace.logits_fingerprint
        CHANGES[kind](session)


def _refuse(event: object) -> None:
    raise PermissionError("no")


@pytest.mark.parametrize("event", [Planned, Selected, Fused, TokenChosen, Answered])
@pytest.mark.parametrize("conditioning", ["window:2", "first-seen", "write-back"])
def test_a_call_whose_hook_raises_gives_no_answer_and_leaves_the_window(
    llama_engine: TransformersHost, event: Any, conditioning: str
) -> None:
    options = {"conditioning": conditioning, "deterministic": conditioning == "window:2"}
    with opened(llama_engine, **options) as session, opened(llama_engine, **options) as untouched:
        for one in (session, untouched):
            one.extend([note(n) for n in range(3)])
            one.ask(QUERY, max_new_tokens=1)
            one.append(note(3))
        before = session.documents
        with session.hooks.on(event, _refuse):
            if event in (TokenChosen, Answered):
                stream = session.stream(QUERY, max_new_tokens=2)
                with pytest.raises(PermissionError):
                    stream.answer  # noqa: B018  # reading it decodes
                with pytest.raises(AnswerUnfinishedError):
                    stream.answer  # noqa: B018  # and once more
            else:
                with pytest.raises(PermissionError):
                    session.ask(QUERY, max_new_tokens=2)
        assert session.documents == before
        if event not in (TokenChosen, Answered):
            mine, theirs = session.ask(QUERY, max_new_tokens=2), untouched.ask(QUERY, max_new_tokens=2)
            assert mine.trace.logits_fingerprint == theirs.trace.logits_fingerprint
            assert mine.usage.computed == theirs.usage.computed


def test_a_function_can_be_removed_and_registered_twice(llama_engine: TransformersHost) -> None:
    seen: list[Any] = []
    with opened(llama_engine) as session:
        first = session.hooks.on(WindowChanged, seen.append)
        second = session.hooks.on(WindowChanged, seen.append)
        session.append(note(1))
        assert len(seen) == 2
        first.remove()
        first.remove()
        session.append(note(2))
        assert len(seen) == 3
        second.remove()
        session.append(note(3))
        assert len(seen) == 3
        assert not session.hooks.wanted(WindowChanged)
        with pytest.raises(ConfigError, match=r"no event of a session\. Known ones.*: WindowChanging"):
            session.hooks.on(int, seen.append)  # type: ignore[type-var]  # on purpose


def test_all_sessions_of_the_process_can_be_observed(llama_engine: TransformersHost) -> None:
    seen: list[RollingSession] = []
    with observe_sessions(seen.append), observe_sessions(seen.append):
        with opened(llama_engine) as first:
            pass
        layout = ConversationLayout(llama_engine.tokenizer, instruction="Answer.")
        second = RollingSession(engine=llama_engine, store=MemoryStore(), config=first.config, layout=layout)
        second.close()
    opened(llama_engine).close()
    assert seen == [first, first, second, second]


def test_an_observer_that_raises_keeps_the_session_from_being_opened(llama_engine: TransformersHost) -> None:
    def refuse(session: RollingSession) -> None:
        raise PermissionError("no")

    with observe_sessions(refuse), pytest.raises(PermissionError):
        opened(llama_engine)
    opened(llama_engine).close()
