"""The window against a naive list, and its errors."""

from __future__ import annotations

import struct

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from rolling_kv.errors import (
    ConfigError,
    DocumentTooLongError,
    DuplicateDocumentError,
    UnknownDocumentError,
    WindowFullError,
)
from rolling_kv.window import Document, Window, content_hash


def document(name: str, *, tokens: int = 3, text: str = "text", pinned: bool = False) -> Document:
    return Document(
        id=name, text=text, token_ids=(1,) * tokens, content_hash=content_hash(text), pinned=pinned
    )


def filled(*names: str, **bounds: int) -> Window:
    window = Window(**bounds)
    for name in names:
        window, _ = window.append(document(name))
    return window


def names(window: Window) -> list[str]:
    return [one.id for one in window]


def test_the_oldest_is_evicted_by_count() -> None:
    window, evicted = filled("a", "b", "c", max_documents=3).append(document("d"))
    assert names(window) == ["b", "c", "d"]
    assert [one.id for one in evicted] == ["a"]


def test_the_oldest_are_evicted_by_tokens() -> None:
    window, evicted = filled("a", "b", "c", max_tokens=10).append(document("d", tokens=7))
    assert names(window) == ["c", "d"]
    assert [one.id for one in evicted] == ["a", "b"]
    assert window.tokens == 10


def test_the_tighter_of_two_bounds_holds() -> None:
    window = filled("a", "b", "c", max_documents=2, max_tokens=100)
    assert names(window) == ["b", "c"]
    window, _ = window.append(document("d", tokens=100))
    assert names(window) == ["d"]


def test_pinned_documents_stay_where_they_are() -> None:
    window = filled("a", "b", "c", max_documents=3).pin("a")
    window, evicted = window.append(document("d"))
    assert names(window) == ["a", "c", "d"]
    assert [one.id for one in evicted] == ["b"]
    window, evicted = window.pin("a", pinned=False).append(document("e"))
    assert [one.id for one in evicted] == ["a"]


def test_replacing_keeps_the_place_and_makes_room() -> None:
    window = filled("a", "b", "c", max_tokens=9)
    replaced, evicted = window.replace("b", document("b", tokens=5, text="longer"))
    assert names(replaced) == ["b", "c"]
    assert [one.id for one in evicted] == ["a"]
    assert names(window) == ["a", "b", "c"], "a window is a value"


def test_the_same_text_twice_under_two_ids() -> None:
    window = filled("a")
    hashed = content_hash("text")
    first = window.unused_id(hashed)
    window, _ = window.append(document(first))
    second = window.unused_id(hashed)
    window, _ = window.append(document(second))
    assert first == hashed[:12]
    assert second == f"{first}-2"
    assert len({one.content_hash for one in window}) == 1


def test_hashes_are_of_the_content_alone() -> None:
    assert content_hash("a") == content_hash("a")
    assert len({content_hash(text) for text in ("", "a", "b", "aa", "a ", "A", "ä", "a\0")}) == 8


def test_a_hash_is_of_a_versioned_length_delimited_encoding() -> None:
    """Stored hashes stay valid: a change of the encoding needs a new version."""
    encoded = "ä".encode()
    expected = xxhash.xxh3_128_hexdigest(b"rolling_kv.document.v1" + struct.pack("<Q", 2) + encoded)
    assert content_hash("ä") == expected
    assert len(expected) == 32


def test_check_integrity_sees_what_does_not_hold() -> None:
    twice = Window(documents=(document("a"), document("a")))
    assert twice.check_integrity() == ["two documents share an id"]
    over = Window(documents=(document("a"), document("b")), max_documents=1)
    assert over.check_integrity() == ["2 documents and 6 tokens exceed the bounds"]
    heavy = Window(documents=(document("a"), document("b")), max_tokens=5)
    assert heavy.check_integrity() == ["2 documents and 6 tokens exceed the bounds"]


def test_pinned_documents_leave_when_named() -> None:
    window, gone = filled("a", "b").pin("a").evict("a")
    assert names(window) == ["b"]
    assert gone.id == "a"


def test_a_replacement_may_take_another_id() -> None:
    window, evicted = filled("a", "b", "c", max_documents=3).replace("b", document("new"))
    assert names(window) == ["a", "new", "c"]
    assert evicted == ()


def test_errors_say_what_to_do() -> None:
    window = filled("a", "b", max_documents=2, max_tokens=6)
    with pytest.raises(DuplicateDocumentError, match=r"'a' is in the window already.*replace\(\)"):
        window.append(document("a"))
    with pytest.raises(DuplicateDocumentError, match="ids are unique"):
        window.replace("a", document("b"))
    with pytest.raises(DocumentTooLongError, match=r"7 tokens .* bounded by 6.*[Ss]plit"):
        window.append(document("c", tokens=7))
    with pytest.raises(UnknownDocumentError, match=r"No document 'z'.*a, b"):
        window.evict("z")
    with pytest.raises(WindowFullError, match=r"pinned.*[Uu]npin"):
        window.pin("a").pin("b").append(document("c"))
    with pytest.raises(WindowFullError, match="pinned"):
        window.pin("b").replace("a", document("a", tokens=4))
    for bounds in ({"max_documents": 0}, {"max_tokens": -1}):
        with pytest.raises(ConfigError, match="at least 1"):
            Window(**bounds)


operations = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 6)),
        st.tuples(st.just("evict"), st.integers(0, 9)),
        st.tuples(st.just("pin"), st.integers(0, 9)),
        st.tuples(st.just("unpin"), st.integers(0, 9)),
        st.tuples(st.just("replace"), st.integers(0, 9), st.integers(1, 6)),
    ),
    max_size=30,
)


@settings(max_examples=200, deadline=None)
@given(operations, st.none() | st.integers(1, 5), st.none() | st.integers(6, 15))
def test_it_is_a_naive_list(
    steps: list[tuple[str, int] | tuple[str, int, int]], count: int | None, tokens: int | None
) -> None:
    window = Window(max_documents=count, max_tokens=tokens)
    model: list[list[object]] = []  # [id, tokens, pinned]

    def over() -> bool:
        held = sum(int(one[1]) for one in model)  # type: ignore[call-overload]
        return (count is not None and len(model) > count) or (tokens is not None and held > tokens)

    def make_room(keep: object) -> bool:
        while over():
            loose = [one for one in model if not one[2] and one[0] != keep]
            if not loose:
                return False
            model.remove(loose[0])
        return True

    for number, (kind, *arguments) in enumerate(steps):
        before = [list(one) for one in model]
        try:
            if kind == "append":
                name = f"d{number}"
                model.append([name, arguments[0], False])
                fits = make_room(name)
                window, _ = window.append(document(name, tokens=arguments[0]))
                assert fits
            elif model:
                chosen = model[arguments[0] % len(model)]
                if kind == "evict":
                    model.remove(chosen)
                    window, _ = window.evict(str(chosen[0]))
                elif kind in ("pin", "unpin"):
                    chosen[2] = kind == "pin"
                    window = window.pin(str(chosen[0]), pinned=kind == "pin")
                else:
                    chosen[1] = arguments[1]
                    fits = make_room(chosen[0])
                    new = document(str(chosen[0]), tokens=arguments[1], pinned=bool(chosen[2]))
                    window, _ = window.replace(str(chosen[0]), new)
                    assert fits
        except WindowFullError:
            assert not fits
            model = before
        assert [(one.id, one.tokens, one.pinned) for one in window] == [tuple(one) for one in model]
        assert window.check_integrity() == []
