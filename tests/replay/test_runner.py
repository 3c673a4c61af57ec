"""Replaying on a tiny model: what depends on history is found, what does not is found not to."""

from __future__ import annotations

import json
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from rolling_kv import RollingSession
from rolling_kv.bench.arms import parse_arms
from rolling_kv.bench.fidelity import Reference, compare
from rolling_kv.config import session_config
from rolling_kv.engine.host import TransformersHost
from rolling_kv.errors import (
    BenchError,
    ConfigError,
    PromptTooLongError,
    TraceError,
    TraceMismatchError,
    TraceTextError,
)
from rolling_kv.hooks import Answered, Planned, observe_sessions
from rolling_kv.replay.history import History, history_of_requests, history_of_traces
from rolling_kv.replay.orders import parse_orders
from rolling_kv.replay.playback import Playback
from rolling_kv.replay.player import UNGUIDED
from rolling_kv.replay.rows import ReplayRow, kv_grid
from rolling_kv.replay.runner import Replayed, ReplayRun, replay
from rolling_kv.replay.trace import read_trace, record_sessions
from rolling_kv.store.memory import MemoryStore
from rolling_kv.window import ConversationLayout
from rolling_kv.workloads import LABELLED
from tests.engine.stock import stock_kv
from tests.tiny_models import tiny_model, tiny_tokenizer

ORDERS = "chronological,reversed,random:0"
HISTORICAL = ("token-topk@0.05:first-seen", "token-topk@0.05:write-back", "document-aligned@0.2:first-seen")
CONTRACT = ("document-aligned@0.2:window:1", "token-topk@0.1:isolated", "direct-reuse:instruction")


def market(count: int = 4, documents: int = 4) -> History:
    requests = list(islice(LABELLED.create("market")(3, documents=documents), count))
    return history_of_requests(requests, source="market", max_new_tokens=4)


def run_of(*arms: str, orders: str = ORDERS, count: int = 4, **options: Any) -> ReplayRun:
    return ReplayRun(parse_arms(arms), parse_orders(orders, count=count), **options)


def by_request(replayed: Replayed, arm: str) -> dict[int, list[ReplayRow]]:
    found: dict[int, list[ReplayRow]] = {}
    for row in replayed.rows:
        if row.arm == arm and row.order not in ("repeat", "reset"):
            found.setdefault(row.request, []).append(row)
    return found


@pytest.fixture(scope="module")
def replayed(llama_engine: TransformersHost) -> Replayed:
    run = run_of(*CONTRACT, *HISTORICAL, "full-prefill", controls=("repeat", "reset"))
    return replay(llama_engine, market(), run)


@pytest.mark.parametrize("arm", [*CONTRACT, "full-prefill"])
def test_under_the_contract_no_order_changes_anything(replayed: Replayed, arm: str) -> None:
    rows = by_request(replayed, arm)
    assert sorted(rows) == [0, 1, 2, 3]
    for of_request in rows.values():
        assert len(of_request) == 3
        for what in ("token_ids", "margins", "logits_fingerprint", "kv_fingerprint", "lineages", "kl"):
            assert len({getattr(row, what) for row in of_request}) == 1


@pytest.mark.parametrize("arm", HISTORICAL)
def test_without_it_orders_change_logits_and_kv(replayed: Replayed, arm: str) -> None:
    rows = by_request(replayed, arm)
    pairs = [pair for of_request in rows.values() for pair in combinations(of_request, 2)]
    assert any(one.logits_fingerprint != other.logits_fingerprint for one, other in pairs)
    reference = {row.request: row for row in replayed.references}
    for one, other in pairs:
        assert one.prompt_digest == other.prompt_digest == reference[one.request].prompt_digest
        segments = reference[one.request].segments
        grids = [kv_grid(row.kv_fingerprint, segments=len(segments)) for row in (one, other)]
        assert (grids[0][:, 0] == grids[1][:, 0]).all(), "the instruction's KV is never another one"
        same_kv, same_logits = (
            bool((grids[0] == grids[1]).all()),
            one.logits_fingerprint == other.logits_fingerprint,
        )
        assert same_kv == same_logits


def test_answers_themselves_differ_where_history_decides(replayed: Replayed) -> None:
    differing = {
        arm: sum(
            one.token_ids != other.token_ids
            for of_request in by_request(replayed, arm).values()
            for one, other in combinations(of_request, 2)
        )
        for arm in (*HISTORICAL, *CONTRACT)
    }
    assert any(differing[arm] for arm in HISTORICAL), differing
    assert not any(differing[arm] for arm in CONTRACT), differing


@pytest.mark.parametrize("arm", [*CONTRACT, *HISTORICAL, "full-prefill"])
def test_a_repeat_is_the_chronological_order_again(replayed: Replayed, arm: str) -> None:
    def seen(order: str) -> list[Any]:
        return [
            (row.request, row.position, row.token_ids, row.logits_fingerprint, row.kv_fingerprint)
            for row in replayed.rows
            if (row.arm, row.order) == (arm, order)
        ]

    assert seen("repeat") == seen("chronological")
    assert len(seen("reset")) == (0 if arm == "full-prefill" else 4)


def test_after_a_reset_only_the_window_before_has_left_something(replayed: Replayed) -> None:
    """The first request has no window before it, so every order that begins with it is a reset."""
    for arm in HISTORICAL:
        first = [row for row in replayed.rows if row.arm == arm and row.request == 0]
        fingerprints = {row.order: row.logits_fingerprint for row in first}
        assert fingerprints["reset"] == fingerprints["chronological"]


def test_full_prefill_is_its_own_reference(replayed: Replayed) -> None:
    reference = {row.request: row for row in replayed.references}
    for row in replayed.rows:
        if row.arm == "full-prefill":
            assert row.token_ids == reference[row.request].token_ids
            assert row.margins == reference[row.request].margins
            assert (row.kl, row.top1, row.kv_fingerprint) == (0.0, 1.0, "")
            assert row.computed == reference[row.request].prompt_tokens


def test_rows_say_what_the_calls_said(llama_engine: TransformersHost) -> None:
    answers = []
    with observe_sessions(
        lambda session: session.hooks.on(Answered, lambda event: answers.append(event.answer)) and None
    ):
        result = replay(llama_engine, market(2), run_of("token-topk@0.2:window:1", count=2, orders="1"))
    for row, answer in zip(result.rows, answers[2:], strict=True):
        assert row.text == answer.text
        assert row.k == answer.usage.recomputed == row.recomputed
        assert (row.prefix, row.reused, row.computed) == (
            answer.usage.prefix,
            answer.usage.reused,
            answer.usage.computed,
        )
        assert row.captured_deviation == answer.trace.selection.captured_deviation
        assert row.lineages == answer.trace.lineages


@pytest.mark.parametrize("arm", ["document-aligned@0.2:window:1", "token-topk@0.1:isolated", "full-prefill"])
def test_kl_and_top1_are_those_of_a_pass_along_the_reference(
    llama_engine: TransformersHost, replayed: Replayed, arm: str
) -> None:
    history = market()
    with Playback(llama_engine, history, parse_arms([arm])[0]) as playback:
        for request in history.requests:
            playback.play(request)
            row = next(
                row
                for row in replayed.rows
                if (row.arm, row.order, row.request) == (arm, "chronological", request.number)
            )
            reference = replayed.references[request.number]
            with RollingSession.open(model=llama_engine, instruction=request.layout.instruction) as session:
                session.extend([one.text for one in request.documents])
                full = session.score(
                    request.question.query,
                    reference.token_ids,
                    answer_prefix=request.question.options["answer_prefix"],
                    policy="full-prefill",
                )
            expected = compare(
                Reference(
                    token_ids=reference.token_ids,
                    ended=len(reference.margins) > len(reference.token_ids),
                    logits=full.logits,
                    text="",
                    right=None,
                    ttft=0.0,
                    prompt_tokens=0,
                ),
                playback.score(request, reference.token_ids),
            )
            assert row.kl == pytest.approx(expected[1], abs=1e-5)
            assert row.top1 == pytest.approx(sum(expected[0]) / len(expected[0]))


def test_the_grid_hashes_keys_and_values_of_every_layer_and_segment(llama_engine: TransformersHost) -> None:
    history = market(1)
    request = history.requests[0]
    with Playback(llama_engine, history, parse_arms(["token-topk@1:isolated"])[0]) as playback:
        played = playback.play(request)
        assert played.kv is not None
        grid = kv_grid(played.kv_fingerprint, segments=len(played.prompt.segments))
        assert grid.shape == (llama_engine.layers, 6)
        for layer, column in ((0, 0), (3, 2), (5, 5)):
            keys, values = played.kv.segment(played.prompt.segments[column], layer)
            digest = xxhash.xxh3_64(np.ascontiguousarray(keys.numpy()).tobytes())
            digest.update(np.ascontiguousarray(values.numpy()).tobytes())
            assert grid[layer, column] == digest.intdigest() % 2**32
        stock = stock_kv(llama_engine, played.prompt.token_ids)
        whole = torch.cat([played.kv.segment(one, 2)[0] for one in played.prompt.segments], dim=1)
        torch.testing.assert_close(whole, stock[2][0], atol=1e-4, rtol=0)


def test_the_window_before_is_populated_as_the_paper_does(llama_engine: TransformersHost) -> None:
    """Under first-seen by a fused request, but for windows whose documents all have their KV."""
    history = market()

    def prompts(arm: str, protocol: Any, order: str) -> list[tuple[str, str, int]]:
        seen: list[tuple[str, str, int]] = []

        def watch(session: RollingSession) -> None:
            session.hooks.on(
                Planned,
                lambda event: seen.append(
                    (event.call.kind, str(event.call.query), len(event.call.documents))
                ),
            )

        run = ReplayRun(parse_arms([arm]), parse_orders(order, count=4), protocol=protocol)
        references = 4
        with observe_sessions(watch):
            replay(llama_engine, history, run)
        return seen[references:]

    queries = [request.question.query for request in history.requests]
    first, second = "token-topk:first-seen", "token-topk:write-back"
    asked = [("ask", query, 4) for query in queries]
    assert prompts(first, "populate", "chronological") == asked
    assert prompts(first, "plain", "reversed") == asked[::-1]
    assert prompts("document-aligned:window:1", "populate", "reversed") == asked[::-1]
    before = [("score", query, 4) for query in queries]
    assert prompts(first, "populate", "reversed") == [
        before[2], asked[3], before[1], asked[2], before[0], asked[1], asked[0]
    ]  # fmt: skip
    assert prompts(second, "populate", "chronological") == [
        asked[0], before[0], asked[1], before[1], asked[2], before[2], asked[3]
    ]  # fmt: skip


def test_leaving_out_calls_that_change_nothing_changes_nothing(
    llama_engine: TransformersHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of("token-topk:first-seen", orders="chronological,random:1")
    short = replay(llama_engine, market(), run)
    original = Playback._populate

    def always(self: Playback, session: Any, request: Any) -> None:
        self._fused.clear()
        original(self, session, request)

    monkeypatch.setattr(Playback, "_populate", always)
    whole = replay(llama_engine, market(), run)
    assert [row.logits_fingerprint for row in short.rows] == [row.logits_fingerprint for row in whole.rows]


def without_seconds(replayed: Replayed) -> list[dict[str, Any]]:
    rows = [row.to_dict() for row in (*replayed.references, *replayed.rows)]
    for row in rows:
        row.pop("ttft")
    return rows


@pytest.mark.parametrize(
    "arm", ["token-topk:first-seen", "token-topk:write-back", "document-aligned:window:1"]
)
@pytest.mark.parametrize("after", [2, 9])
def test_a_stopped_run_goes_on_to_the_same_rows(
    llama_engine: TransformersHost, tmp_path: Path, arm: str, after: int
) -> None:
    run = run_of(arm, orders="reversed,random:2", controls=("reset",))
    whole = replay(llama_engine, market(), run)

    def stop(done: int, total: int, what: str) -> None:
        if done == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replay(llama_engine, market(), run, out=tmp_path, progress=stop)
    lines = (tmp_path / "rows.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == after + 1
    (tmp_path / "rows.jsonl").write_bytes(b"".join(lines[:-1]) + lines[-1][:30])  # killed while it wrote
    shown: list[tuple[int, int, str]] = []
    resumed = replay(llama_engine, market(), run, out=tmp_path, progress=lambda *report: shown.append(report))
    assert without_seconds(resumed) == without_seconds(whole)
    assert shown[-1][:2] == (16 - after + 1, 16 - after + 1)
    assert any("left" in what for _, _, what in shown)


def test_a_folder_takes_more_arms_and_refuses_another_history(
    llama_engine: TransformersHost, tmp_path: Path
) -> None:
    first = replay(llama_engine, market(), run_of("direct-reuse:isolated", orders="1"), out=tmp_path)
    more = run_of("direct-reuse:isolated", "token-topk:isolated", orders="2")
    shown: list[int] = []
    second = replay(
        llama_engine, market(), more, out=tmp_path, progress=lambda done, total, what: shown.append(total)
    )
    assert max(shown) == 12
    assert len(first.rows) == 4
    assert len(second.rows) == 16
    again = replay(llama_engine, market(), run_of("direct-reuse:isolated", orders="1"), out=tmp_path)
    assert again == first
    (tmp_path / "references" / "000002.safetensors").unlink()
    replay(llama_engine, market(), run_of("direct-reuse:instruction", orders="1"), out=tmp_path)
    assert (tmp_path / "references" / "000002.safetensors").exists()
    with pytest.raises(BenchError, match="other settings \\(history\\)"):
        replay(llama_engine, market(5), more, out=tmp_path)
    with pytest.raises(BenchError, match="other settings \\(protocol\\)"):
        replay(llama_engine, market(), run_of("full-prefill", protocol="plain"), out=tmp_path)


def test_only_what_an_order_holds_is_answered(llama_engine: TransformersHost, tmp_path: Path) -> None:
    order = tmp_path / "mine.txt"
    order.write_text("3 1")
    result = replay(llama_engine, market(), run_of("direct-reuse:isolated", orders=str(order)))
    assert [row.request for row in result.references] == [1, 3]
    assert [(row.request, row.position) for row in result.rows] == [(3, 0), (1, 1)]


def test_what_is_wrong_is_said_before_anything_is_computed(llama_engine: TransformersHost) -> None:
    def computed(done: int, total: int, what: str) -> None:
        raise AssertionError("something was computed")

    with pytest.raises(ConfigError, match=r"'session' takes the settings that were recorded, and market"):
        replay(llama_engine, market(), run_of("session"), progress=computed)
    with pytest.raises(PromptTooLongError):
        replay(llama_engine, market(1, documents=80), run_of("full-prefill", count=1))


def agent(session: RollingSession) -> None:
    for number in range(5):
        session.append(f"Note {number} of the day says {number * 7919 % 1000}.", id=f"obs-{number}")
        if number:
            session.ask(f"What did note {number} say?", max_new_tokens=3, answer_prefix="It said")


@pytest.mark.parametrize("conditioning", ["window:2", "first-seen", "stream:2"])
def test_a_recorded_agent_is_replayed_under_its_own_settings(
    llama_engine: TransformersHost, tmp_path: Path, conditioning: str
) -> None:
    path = tmp_path / "run.jsonl"
    with RollingSession.open(
        model=llama_engine,
        window=3,
        trace=path,
        policy="token-topk",
        ratio=0.1,
        conditioning=conditioning,
        deterministic=conditioning == "window:2",
    ) as session:
        agent(session)
    recording = read_trace(path)
    history = history_of_traces([recording])
    assert history.settings is not None
    result = replay(llama_engine, history, run_of("session", orders=ORDERS, protocol="plain"))
    chronological = [row for row in result.rows if row.order == "chronological"]
    recorded = [request.line for request in recording.requests]
    assert [row.prompt_digest for row in chronological] == [line.prompt_digest for line in recorded]
    if conditioning != "stream:2":  # whose documents see those that no window of a request held alone
        assert [row.logits_fingerprint for row in chronological] == [
            line.logits_fingerprint for line in recorded
        ]
        assert [row.token_ids for row in chronological] == [line.answer_ids for line in recorded]
    varies = {
        len({row.logits_fingerprint for row in rows}) > 1 for rows in by_request(result, "session").values()
    }
    assert (True in varies) == (conditioning != "window:2")


def test_a_rotated_trace_is_one_history(llama_engine: TransformersHost, tmp_path: Path) -> None:
    path, old = tmp_path / "run.jsonl", tmp_path / "run.jsonl.1"
    with RollingSession.open(model=llama_engine, window=2, trace=path, ingest="lazy") as session:
        for number in range(4):
            session.append(f"Note {number}.")
            if number == 2:
                path.rename(old)
            session.ask(f"And {number}?", max_new_tokens=1)
    whole = history_of_traces([read_trace(old), read_trace(path)])
    assert [[one.text for one in request.previous] for request in whole.requests] == [
        [], ["Note 0."], ["Note 0.", "Note 1."], ["Note 1.", "Note 2."]
    ]  # fmt: skip
    before = [request.previous_question for request in whole.requests]
    assert [one and one.query for one in before] == [None, "And 0?", "And 1?", "And 2?"]
    apart = history_of_traces([read_trace(path), read_trace(old)])
    assert [request.previous_question is None for request in apart.requests] == [True, False, True, False]


def test_conversations_of_several_sessions_are_replayed(
    llama_engine: TransformersHost, tmp_path: Path
) -> None:
    with record_sessions(tmp_path) as paths:
        for name in ("Ann", "Bob"):
            layout = ConversationLayout(llama_engine.tokenizer, instruction=f"You help {name}.")
            config = session_config(ingest="lazy")
            with RollingSession(
                engine=llama_engine, store=MemoryStore(), config=config, layout=layout
            ) as session:
                turns = [{"role": "user", "content": f"I am {name}."}]
                for number in range(3):
                    session.show(turns[:-1])
                    answer = session.ask(turns[-1], max_new_tokens=3, temperature=0.9, seed=number)
                    turns += [
                        {"role": "assistant", "content": answer.text or "Hm."},
                        {"role": "user", "content": f"And {number}?"},
                    ]
    history = history_of_traces([read_trace(path) for path in paths])
    assert len(history) == 6
    result = replay(llama_engine, history, run_of("session", "token-topk:first-seen", orders="3", count=6))
    recorded = [request.line for path in paths for request in read_trace(path).requests]
    chronological = [row for row in result.rows if (row.arm, row.order) == ("session", "chronological")]
    assert [row.prompt_digest for row in chronological] == [line.prompt_digest for line in recorded]
    assert [row.token_ids for row in chronological] == [line.answer_ids for line in recorded]
    assert [row.query for row in result.references] == [
        "I am Ann.",
        "And 0?",
        "And 1?",
        "I am Bob.",
        "And 0?",
        "And 1?",
    ]


def test_traces_that_cannot_be_replayed_say_why(llama_engine: TransformersHost, tmp_path: Path) -> None:
    def recorded(name: str, **options: Any) -> Any:
        with RollingSession.open(model=llama_engine, trace=tmp_path / name, **options) as session:
            agent(session)
        return read_trace(tmp_path / name)

    hashed = recorded("hashed.jsonl", trace_text=False)
    with pytest.raises(TraceTextError, match=r"hashed\.jsonl was recorded with trace_text=False"):
        history_of_traces([hashed])
    plain = recorded("plain.jsonl")
    other = TransformersHost(tiny_model("llama", seed=5), tiny_tokenizer(), name="other")
    with pytest.raises(
        TraceMismatchError, match="recorded with the model 'tiny-llama', and 'other' has other"
    ):
        replay(other, history_of_traces([plain]), run_of("session"))
    differing = history_of_traces([plain, recorded("two.jsonl", policy="epic")])
    with pytest.raises(ConfigError, match="none, or several that differ"):
        replay(llama_engine, differing, run_of("session"))
    with RollingSession.open(model=llama_engine, trace=tmp_path / "silent.jsonl") as session:
        session.append("Nobody asks.")
    with pytest.raises(TraceError, match="no answered request"):
        history_of_traces([read_trace(tmp_path / "silent.jsonl")])
    history = history_of_traces([plain])
    tokenizer = tiny_tokenizer()
    template, tokenizer.chat_template = (
        tokenizer.chat_template,
        tokenizer.chat_template.replace("\\n", " ", 1),
    )
    try:
        with pytest.raises(TraceMismatchError, match="request 0 is not the one that was recorded"):
            replay(llama_engine, history, run_of("session"))
    finally:
        tokenizer.chat_template = template


def test_an_answer_that_was_kept_to_a_form_is_replayed_without_it_and_says_so(
    llama_engine: TransformersHost, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    with RollingSession.open(model=llama_engine, trace=path) as session:
        session.append("Note 1 says 919.")
        session.ask("Well?", max_new_tokens=2, guide=lambda ids, logits: logits.flip(0))
    result = replay(
        llama_engine, history_of_traces([read_trace(path)]), run_of("session", orders="1", count=1)
    )
    assert result.rows[0].degraded == (UNGUIDED,)
    json.dumps(result.rows[0].to_dict())
