"""`show`: exactly these documents in the window, in one step."""

from __future__ import annotations

import pytest

from rolling_kv import RollingSession
from rolling_kv.engine.host import TransformersHost
from rolling_kv.errors import ConfigError, DuplicateDocumentError, EmptyDocumentError, WindowFullError

QUERY = "Which number did note 3 say?"


def note(number: int) -> str:
    return f"Note {number} of the day says {number * 7919 % 1000}."


def held(session: RollingSession) -> list[str]:
    return [document.text for document in session.documents]


def test_the_window_holds_exactly_what_is_shown(llama_engine: TransformersHost) -> None:
    with RollingSession.open(model=llama_engine, window=4) as session:
        session.extend([note(n) for n in range(4)])
        change = session.show([note(n) for n in (2, 9, 3)])
        assert held(session) == [note(2), note(9), note(3)]
        assert len(change.evicted) == 2
        assert change.document_id == session.documents[-1].id
        assert change.computed > 0
        asked = session.ask(QUERY, max_new_tokens=1)
        assert session.show([note(n) for n in (2, 9, 3)]).computed == 0
        assert session.show([]).document_id == ""
        assert held(session) == []
    with RollingSession.open(model=llama_engine, window=4) as other:
        other.extend([note(n) for n in (2, 9, 3)])
        assert other.ask(QUERY, max_new_tokens=1).trace.logits_fingerprint == asked.trace.logits_fingerprint


def test_documents_that_stay_keep_their_pins_and_their_stream(llama_engine: TransformersHost) -> None:
    with RollingSession.open(model=llama_engine, conditioning="stream:2", deterministic=False) as session:
        session.extend([note(n) for n in range(4)], ids=["a", "b", "c", "d"])
        session.pin("c")
        stayed = session.documents[2]
        session.show([note(2), note(7)], ids=["c", "e"])
        assert session.documents[0] == stayed
        assert session.documents[1].stream == tuple(
            session._layout.document(note(n), document_id="").token_ids for n in (2, 3)
        )
        session.show([note(9)], ids=["c"])  # another text under that id is another document
        assert held(session) == [note(9)]
        assert not session.documents[0].pinned


def test_the_same_text_may_be_shown_twice(llama_engine: TransformersHost) -> None:
    with RollingSession.open(model=llama_engine) as session:
        session.show([note(1), note(1)])
        assert held(session) == [note(1), note(1)]
        assert len({document.id for document in session.documents}) == 2


def test_what_cannot_be_shown_changes_nothing(llama_engine: TransformersHost) -> None:
    with RollingSession.open(model=llama_engine, window=2) as session:
        session.extend([note(1), note(2)])
        before = session.documents
        with pytest.raises(WindowFullError, match=r"3 documents of \d+ tokens exceed .* Show fewer"):
            session.show([note(3), note(4), note(5)])
        with pytest.raises(DuplicateDocumentError):
            session.show([note(3), note(4)], ids=["x", "x"])
        with pytest.raises(EmptyDocumentError):
            session.show([note(3), " "])
        with pytest.raises(ConfigError, match="2 texts and 1 ids"):
            session.show([note(3), note(4)], ids=["x"])
        with pytest.raises(TypeError, match="list of texts"):
            session.show(note(3))
        assert session.documents == before
