"""Forgetting a document: nothing that knew it is left, in memory or on disk, and the rest still answers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rolling_kv import RollingSession
from rolling_kv.cli import main
from rolling_kv.engine.host import TransformersHost
from rolling_kv.errors import StoreLockedError, WindowError
from rolling_kv.store import token_digest
from rolling_kv.store.disk import DiskStore
from tests.settings import REPAIRING

QUERY = "Which number did note 3 say?"


def note(number: int) -> str:
    return f"Note {number} of the day says {number * 7919 % 1000}."


def opened(engine: TransformersHost, **options: object) -> RollingSession:
    return RollingSession.open(model=engine, **(REPAIRING | {"instruction": "Answer."} | options))


def test_the_document_and_all_that_saw_it_are_gone(llama_engine: TransformersHost, tmp_path: Path) -> None:
    with opened(llama_engine, conditioning="window:2", store=tmp_path) as session:
        session.extend([note(n) for n in range(6)], ids=list("abcdef"))
        before = {one.name: one.key for one in session.provenance()}
        change = session.evict("c", forget=True)
        assert change.forgotten == 6, "c after ab, b and nothing; d after bc and c; e after cd"
        assert session.ask(QUERY, max_new_tokens=1).usage.degraded == ()
        store = DiskStore(tmp_path, read_only=True)
        assert store.holds(change.digest) == []
        kept = {row.key for row in store.rows()}
        store.close()
        assert not {before[name] for name in "cde"} & kept
        assert {before[name] for name in "abf"} <= kept
        after = session.next_token_logits(QUERY)
    with opened(llama_engine, conditioning="window:2") as session:
        session.extend([note(n) for n in (0, 1, 3, 4, 5)])
        assert session.next_token_logits(QUERY).equal(after)


def test_forgetting_reaches_memory_and_fused_history(llama_engine: TransformersHost) -> None:
    with opened(llama_engine, conditioning="first-seen", deterministic=False) as session:
        session.extend([note(n) for n in range(3)], ids=list("abc"))
        session.ask(QUERY, max_new_tokens=1)
        session.append(note(4), id="d")
        session.ask(QUERY, max_new_tokens=1)
        change = session.evict("b", forget=True)
        made = {one.name: one.made for one in session.provenance()}
    assert change.forgotten == 3, "b itself, and c and d, which were fused behind it"
    assert made == {"instruction": "prefilled", "a": "fused", "c": "computed", "d": "computed"}


def test_what_cannot_be_forgotten_is_refused_and_left_alone(llama_engine: TransformersHost) -> None:
    with opened(llama_engine) as session:
        session.append(note(1), id="a")
        session.append(note(1), id="twin")
        with pytest.raises(WindowError, match=r"'twin' with the same text"):
            session.evict("a", forget=True)
        assert [document.id for document in session.documents] == ["a", "twin"]
        session.evict("twin")
        assert session.evict("a", forget=True).forgotten > 0
    with opened(llama_engine, conditioning="stream:1", deterministic=False) as session:
        session.append(note(1), id="a")
        with pytest.raises(WindowError, match="lives on"):
            session.evict("a", forget=True)
        assert len(session.documents) == 1


def test_the_command_proves_it(
    llama_engine: TransformersHost,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with opened(llama_engine, store=tmp_path) as session:
        session.append(note(1), id="a")
        session.append(note(2), id="b")
        digest = token_digest(session.documents[0].token_ids)

        def verify() -> int:
            arguments = ["rolling-kv", "store", "verify", str(tmp_path), "--forgotten", digest]
            monkeypatch.setattr(sys, "argv", arguments)
            with pytest.raises(SystemExit) as stop:
                main()
            return int(stop.value.code or 0)

        assert verify() == 1
        assert "was computed from the forgotten document" in capsys.readouterr().out
        assert session.evict("a", forget=True).digest == digest
        assert verify() == 0
        assert f"Nothing is left of {digest}" in capsys.readouterr().out.replace("\n", " ")


def test_forgetting_that_failed_can_be_tried_again(
    llama_engine: TransformersHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked(*_: object) -> int:
        raise StoreLockedError("busy")

    with opened(llama_engine, store=tmp_path) as session:
        session.append(note(1), id="a")
        with monkeypatch.context() as broken:
            broken.setattr(session._store, "forget", locked)
            with pytest.raises(StoreLockedError):
                session.evict("a", forget=True)
        assert [document.id for document in session.documents] == ["a"]
        assert session.evict("a", forget=True).forgotten == 1
