"""The trace: what is recorded can be rebuilt, and what was altered, cut off, rotated or shared is noticed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rolling_kv import RollingSession
from rolling_kv.config import session_config
from rolling_kv.engine.host import TransformersHost
from rolling_kv.errors import (
    TraceDamagedError,
    TraceError,
    TraceFormatError,
    TraceInUseError,
)
from rolling_kv.hooks import WindowChanged
from rolling_kv.replay.trace import Recording, read_trace, record_sessions, recorder_of
from rolling_kv.replay.trace.lines import Entry
from rolling_kv.replay.trace.recorder import _difference, _runs
from rolling_kv.store.memory import MemoryStore
from rolling_kv.window import ConversationLayout
from tests.settings import REPAIRING
from tests.tiny_models import HERMES, tiny_tokenizer

QUERY = "Which number did note 3 say?"


def note(number: int) -> str:
    return f"Note {number} of the day says {number * 7919 % 1000}."


def opened(engine: TransformersHost, path: Path, **options: Any) -> RollingSession:
    return RollingSession.open(
        model=engine,
        trace=path,
        **(REPAIRING | {"instruction": "Answer.", "window": 3, "ingest": "lazy"} | options),
    )


def agent(session: RollingSession, *, first: int = 0, steps: int = 3) -> list[tuple[list[str], Any]]:
    """Windows and answers, as the agent saw them."""
    seen = []
    for number in range(first, first + steps):
        session.append(note(number), id=f"obs-{number}")
        answer = session.ask(QUERY, max_new_tokens=2, answer_prefix="It is", stop=["\n"])
        seen.append(([document.text for document in session.documents], answer))
    return seen


def texts(recording: Recording) -> list[list[str | None]]:
    return [[document.text for document in request.window] for request in recording.requests]


def test_a_trace_holds_what_was_asked_over_which_window(
    llama_engine: TransformersHost, tmp_path: Path
) -> None:
    path = tmp_path / "deep" / "run.jsonl"
    with opened(llama_engine, path) as session:
        seen = agent(session, steps=5)
        session.pin("obs-3")
        session.replace("obs-4", note(40))
        session.evict("obs-2")
        last = session.ask("And now?", max_new_tokens=1)
        session.show([note(9), note(4)], ids=["nine", "four"])
        shown = session.ask(QUERY, max_new_tokens=1, policy="full-prefill")
        prompt = session.prompt_token_ids(QUERY)
        documents = session.documents
    recording = read_trace(path)
    assert not recording.cut
    (section,) = recording.sections
    assert section.header.model.model == llama_engine.identity.model
    assert section.header.settings["window"] == 3
    assert "store" not in section.header.settings
    assert section.header.layout.instruction == "Answer."
    assert texts(recording)[:5] == [window for window, _ in seen]
    assert texts(recording)[5:] == [[note(3), note(40)], [note(9), note(4)]]
    assert [one.id for one in recording.requests[-1].window] == ["nine", "four"]
    assert recording.requests[5].window[0].pinned
    assert recording.requests[0].previous == ()
    for earlier, later in pairwise(recording.requests):
        assert later.previous == earlier.window
    for request, (_, answer) in zip(recording.requests, seen, strict=False):
        line = request.line
        assert line.answer == answer.text
        assert line.answer_ids == answer.token_ids
        assert line.query == QUERY
        assert line.options == {"max_new_tokens": 2, "answer_prefix": "It is", "stop": ["\n"]}
        assert line.lineages == answer.trace.lineages
        assert line.margins == answer.trace.margins
        assert line.logits_fingerprint == answer.trace.logits_fingerprint
        runs = line.selection.runs
        assert [p for start, stop in runs for p in range(start, stop)] == list(answer.trace.selected)
        assert line.usage.prompt_tokens == answer.usage.prompt_tokens
        assert line.timing.ttft == answer.timing.ttft
    assert recording.requests[5].line.logits_fingerprint == last.trace.logits_fingerprint
    assert recording.requests[6].line.lineages == ()
    assert recording.requests[6].line.answer == shown.text
    assert [one.token_ids for one in recording.requests[6].window] == [one.token_ids for one in documents]
    assert recording.requests[6].line.usage.prompt_tokens == len(prompt)
    assert os.stat(path).st_mode & 0o077 == 0, "only its owner may read it"


def test_without_texts_nothing_of_theirs_is_in_the_file(
    llama_engine: TransformersHost, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    secret = "Zugangscode 4711 for the safe"
    with opened(llama_engine, path, trace_text=False, instruction=secret, namespace=secret) as session:
        session.append(secret, id=secret)
        session.extend([note(1), note(2)])
        answer = session.ask(
            secret, max_new_tokens=3, answer_prefix=secret, stop=[secret], labels=[(secret, 0, 3)]
        )
        ids = session.documents[0].token_ids
    data = path.read_text()
    assert secret not in data
    assert "4711" not in data
    assert json.dumps(ids)[1:-1].replace(" ", "") not in data.replace(" ", "")
    (request,) = read_trace(path).requests
    assert request.window[0].text is None
    assert request.window[0].token_ids is None
    assert request.line.answer_ids is None
    assert request.line.answer != answer.text
    assert request.line.logits_fingerprint == answer.trace.logits_fingerprint


def test_messages_and_tools_are_recorded(llama_engine: TransformersHost, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tools = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}]
    call = {"type": "function", "function": {"name": "look", "arguments": {"what": "note 3"}}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "Look it up."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "look", "content": "note 3 says 757"},
    ]
    plain, tokenizer.chat_template = tokenizer.chat_template, HERMES
    try:
        layout = ConversationLayout(llama_engine.tokenizer, instruction="Help.", tools=tools)
    finally:
        tokenizer.chat_template = plain
    config = session_config(trace=tmp_path / "run.jsonl", ingest="lazy")
    with RollingSession(engine=llama_engine, store=MemoryStore(), config=config, layout=layout) as session:
        session.show(turns[:-1])
        session.ask(turns[-1], max_new_tokens=1)
    recording = read_trace(tmp_path / "run.jsonl")
    assert recording.sections[0].header.layout.kind == "conversation"
    assert recording.sections[0].header.layout.instruction == "Help."
    assert list(recording.sections[0].header.layout.tools) == tools
    (request,) = recording.requests
    assert [json.loads(one.text or "") for one in request.window] == turns[:-1]
    assert request.line.query == turns[-1]


@pytest.mark.parametrize("number", range(1, 11))
@pytest.mark.parametrize("kind", ["altered", "removed", "repeated", "moved"])
def test_an_altered_line_is_found(
    llama_engine: TransformersHost, tmp_path: Path, number: int, kind: str
) -> None:
    path = tmp_path / "run.jsonl"
    with opened(llama_engine, path) as session:
        agent(session, steps=4)
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 13
    line = lines[number]
    if kind == "altered":
        lines[number] = line.replace(b'"kind"', b'"Kind"', 1)
    elif kind == "removed":
        del lines[number]
    elif kind == "repeated":
        lines.insert(number, line)
    else:
        lines[number], lines[number + 1] = lines[number + 1], lines[number]
    path.write_bytes(b"".join(lines))
    where = number + 1 + (kind == "repeated")
    with pytest.raises(TraceDamagedError, match=rf"run\.jsonl, line {where} .*altered"):
        read_trace(path)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10**6), value=st.integers(1, 255))
def test_every_altered_byte_is_found(trace: bytes, tmp_path: Path, place: int, value: int) -> None:
    path = tmp_path / "altered.jsonl"
    data = bytearray(trace)
    data[place % (len(data) - 1)] ^= value  # all but the last line break, without which a line is cut off
    path.write_bytes(bytes(data))
    with pytest.raises(TraceError):
        read_trace(path)


@pytest.fixture(scope="module")
def trace(llama_engine: TransformersHost, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("trace") / "run.jsonl"
    with opened(llama_engine, path) as session:
        agent(session, steps=2)
    return path.read_bytes()


def test_a_file_that_is_none_or_of_another_version_says_so(trace: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read_trace(path)
    path.write_bytes(b"")
    with pytest.raises(TraceError, match="is empty"):
        read_trace(path)
    for data in (b"hello\n", b"[1]\n", b'{"kind":"header"}\n', b"\xff\xfe\n"):
        path.write_bytes(data)
        with pytest.raises(TraceFormatError, match="is not a trace"):
            read_trace(path)
    path.write_bytes(trace.replace(b'"version":1', b'"version":7', 1))
    with pytest.raises(TraceFormatError, match=r"version 7; this release reads and writes version 1"):
        read_trace(path)


def test_another_file_is_not_written_to(llama_engine: TransformersHost, trace: bytes, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes")
    with pytest.raises(TraceFormatError, match="is not a trace"):
        opened(llama_engine, path)
    assert path.read_text() == "my notes"
    path.write_bytes(trace.replace(b'"version":1', b'"version":2', 1))
    with pytest.raises(TraceFormatError, match="version 2"):
        opened(llama_engine, path)
    with pytest.raises(TraceError, match="cannot be written"):
        opened(llama_engine, tmp_path)
    with pytest.raises(TraceError, match="cannot be written"):
        opened(llama_engine, path / "run.jsonl")


def test_a_line_cut_off_is_dropped_and_then_trimmed(
    llama_engine: TransformersHost, trace: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    for cut in (1, 40, 900):
        path.write_bytes(trace[:-cut])
        recording = read_trace(path)
        assert recording.cut
        assert len(recording.requests) == 1
    with opened(llama_engine, path, window=2) as session:
        agent(session, first=7, steps=1)
    recording = read_trace(path)
    assert not recording.cut
    assert len(recording.sections) == 2
    assert texts(recording) == [[note(0)], [note(7)]]
    assert recording.requests[1].previous == ()
    path.write_bytes(trace[:20])
    with opened(llama_engine, path) as session:
        agent(session, steps=1)
    assert texts(read_trace(path)) == [[note(0)]]


def test_a_second_recorder_of_the_file_is_refused(llama_engine: TransformersHost, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with opened(llama_engine, path) as session:
        with pytest.raises(TraceInUseError, match=r"Another session records to .*run\.jsonl"):
            opened(llama_engine, path)
        agent(session, steps=1)
    with opened(llama_engine, path) as session:
        agent(session, steps=1)
    assert len(read_trace(path).requests) == 2


def _hold(path: str, ready: Any) -> None:
    from rolling_kv.replay.trace.file import TraceFile

    held = TraceFile(Path(path))
    ready.set()
    signal.pause()
    held.close()


def test_another_process_keeps_it_until_it_is_killed(llama_engine: TransformersHost, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_hold, args=(str(path), ready))
    process.start()
    try:
        assert ready.wait(60)
        with pytest.raises(TraceInUseError):
            opened(llama_engine, path)
    finally:
        process.kill()
        process.join()
    opened(llama_engine, path).close()


@pytest.mark.parametrize("how", ["renamed", "removed", "cut", "made anew"])
def test_every_file_of_a_rotated_trace_can_be_read_alone(
    llama_engine: TransformersHost, tmp_path: Path, how: str
) -> None:
    path, old = tmp_path / "run.jsonl", tmp_path / "run.jsonl.1"
    with opened(llama_engine, path) as session:
        first = agent(session, steps=3)
        stream = session.stream(QUERY, max_new_tokens=1)  # begun before, and ended after
        began = [document.text for document in session.documents]
        old.write_bytes(path.read_bytes())
        if how == "cut":
            os.truncate(path, 0)
        else:
            path.unlink()
        if how == "made anew":
            path.touch()
        second = agent(session, first=3, steps=4)
        assert stream.answer
    assert texts(read_trace(old)) == [window for window, _ in first]
    recording = read_trace(path)
    assert texts(recording) == [*(window for window, _ in second), began]
    assert recording.sections[0].header.part == 1
    assert [one.text for one in recording.requests[0].previous] == first[-1][0]


def test_what_a_later_hook_refuses_did_not_happen(llama_engine: TransformersHost, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"

    def refuse(event: object) -> None:
        raise PermissionError

    with opened(llama_engine, path) as session:
        agent(session, steps=2)
        with session.hooks.on(WindowChanged, refuse), pytest.raises(PermissionError):
            session.append(note(8))
        agent(session, first=5, steps=1)
    assert texts(read_trace(path))[-1] == [note(0), note(1), note(5)]


def test_a_full_disk_ends_the_call_and_leaves_a_whole_trace(
    llama_engine: TransformersHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.jsonl"
    with opened(llama_engine, path) as session:
        agent(session, steps=2)
        monkeypatch.setattr(os, "write", half)
        with pytest.raises(TraceError, match="No space left on device"):
            session.append(note(2))
        assert len(session.documents) == 2
        with pytest.raises(TraceError):
            session.ask(QUERY, max_new_tokens=1)
        monkeypatch.undo()
        agent(session, first=6, steps=1)
    assert texts(read_trace(path)) == [[note(0)], [note(0), note(1)], [note(0), note(1), note(6)]]


def half(file: int, data: bytes) -> int:
    """A disk that is full after half of what is written."""
    return _WRITE(file, data[: len(data) // 2])


_WRITE = os.write


def test_a_rotation_onto_a_full_disk_begins_a_whole_file_later(
    llama_engine: TransformersHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, old = tmp_path / "run.jsonl", tmp_path / "run.jsonl.1"
    with opened(llama_engine, path) as session:
        agent(session, steps=2)
        path.rename(old)
        monkeypatch.setattr(os, "write", half)
        for _ in range(2):
            with pytest.raises(TraceError, match="No space left on device"):
                session.append(note(2))
        monkeypatch.undo()
        agent(session, first=6, steps=1)
    assert texts(read_trace(path)) == [[note(0), note(1), note(6)]]


def test_a_forgotten_document_on_a_full_disk_is_out_of_the_window(
    llama_engine: TransformersHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.jsonl"
    with opened(llama_engine, path) as session:
        agent(session, steps=1)
        monkeypatch.setattr(os, "write", half)
        with pytest.raises(TraceError):
            session.evict(session.documents[0].id, forget=True)
        monkeypatch.undo()
        agent(session, first=3, steps=1)
    assert texts(read_trace(path))[-1] == [note(3)]


@pytest.mark.parametrize("stands", ["another file", "a folder"])
def test_what_takes_the_place_of_a_trace_is_left_alone(
    llama_engine: TransformersHost, tmp_path: Path, stands: str
) -> None:
    path = tmp_path / "run.jsonl"
    with opened(llama_engine, path) as session:
        agent(session, steps=1)
        path.unlink()
        if stands == "a folder":
            path.mkdir()
        else:
            path.write_text("my notes, which are longer than any trace\n" * 500)
        before = None if path.is_dir() else path.read_bytes()
        for _ in range(2):
            with pytest.raises(TraceError):
                session.append(note(1))
        assert (None if path.is_dir() else path.read_bytes()) == before
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink()
        agent(session, first=2, steps=1)
    assert texts(read_trace(path)) == [[note(0), note(2)]]


def test_an_answer_that_ends_after_its_session_is_not_lost(
    llama_engine: TransformersHost, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    with opened(llama_engine, path) as session:
        agent(session, steps=1)
        stream = session.stream(QUERY, max_new_tokens=1)
    assert stream.answer.token_ids
    assert len(read_trace(path).requests) == 1


def test_all_sessions_of_the_process_are_recorded(llama_engine: TransformersHost, tmp_path: Path) -> None:
    with record_sessions(tmp_path) as paths:
        for first in (0, 5):
            with RollingSession.open(model=llama_engine, ingest="lazy") as session:
                agent(session, first=first, steps=1)
    assert [path.name for path in paths] == ["session-0.jsonl", "session-1.jsonl"]
    assert [texts(read_trace(path)) for path in paths] == [[[note(0)]], [[note(5)]]]


def test_a_session_can_be_recorded_from_the_middle_on(llama_engine: TransformersHost, tmp_path: Path) -> None:
    with RollingSession.open(model=llama_engine, ingest="lazy") as session:
        agent(session, steps=2)
        recorder = recorder_of(session, tmp_path / "run.jsonl")
        agent(session, first=2, steps=1)
        recorder.close()
        agent(session, first=3, steps=1)
    assert texts(read_trace(tmp_path / "run.jsonl")) == [[note(0), note(1), note(2)]]


def entries(names: list[str]) -> list[Entry]:
    return [Entry(id=name, hash=name.upper()) for name in names]


@given(st.lists(st.sampled_from("abcdefg"), unique=True), st.lists(st.sampled_from("abcdefg"), unique=True))
def test_the_difference_of_two_windows_leads_from_one_to_the_other(
    before: list[str], after: list[str]
) -> None:
    removed, inserted = _difference(entries(before), entries(after))
    left = [entry for entry in entries(before) if entry.id not in removed]
    for place, entry in inserted:
        left.insert(place, entry)
    assert left == entries(after)
    if sorted(before) == before and sorted(after) == after:
        assert set(removed) == set(before) - set(after)
        assert len(inserted) == len(set(after) - set(before))


@given(st.sets(st.integers(0, 40)))
def test_runs_are_the_positions(positions: set[int]) -> None:
    runs = list(_runs(sorted(positions)))
    assert [p for start, stop in runs for p in range(start, stop)] == sorted(positions)
    assert all(stop < start for (_, stop), (start, _) in pairwise(runs))
