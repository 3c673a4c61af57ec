"""Needle requests: short notes, of which one is asked for its number (RULER's single-key needle)."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count

from rolling_kv.workloads.notes import (
    INSTRUCTION,
    MOST_DOCUMENTS,
    fact,
    note,
    numbers,
    people,
    require_documents,
    start,
)
from rolling_kv.workloads.request import LabelledRequest, require_questions

_PEOPLE = 90  # who take turns in a rolling stream, by first name


def needle_requests(seed: int, *, documents: int) -> Iterator[LabelledRequest]:
    """The endless requests of `seed`: `documents` fresh notes of about 20 tokens, one of them asked.

    Every note has a person and a number of its own; the asked note is anywhere, uniformly, and its span is
    the key and the value, as "Alice is 123". ConfigError for fewer than one document or more than 900.
    """
    require_documents(documents, least=1)
    return _requests(random.Random(f"needle:{seed}"), documents)


def rolling_needle_requests(seed: int, *, documents: int, questions: int = 1) -> Iterator[LabelledRequest]:
    """The same over a window that rolls: after so many questions it loses its oldest note and gains one.

    No person and no number stands in a window twice, and no note is asked twice of one window. ConfigError
    as for `needle_requests`, and for fewer than one question.
    """
    require_documents(documents, least=1)
    require_questions(questions)
    return _rolling(random.Random(f"rolling-needle:{seed}"), documents, questions)


def _requests(rng: random.Random, documents: int) -> Iterator[LabelledRequest]:
    while True:
        names, lockers = people(rng, documents), numbers(rng, documents)
        notes = [note(rng, place, names[place], lockers[place]) for place in range(documents)]
        asked = rng.randrange(documents)
        yield _asked(notes, asked, names[asked], lockers[asked])


def _rolling(rng: random.Random, documents: int, questions: int) -> Iterator[LabelledRequest]:
    names, lockers = people(rng, max(documents, _PEOPLE)), numbers(rng, MOST_DOCUMENTS)
    window: deque[tuple[str, str, str]] = deque(maxlen=documents)
    for place in count():
        name, locker = names[place % len(names)], lockers[place % len(lockers)]
        window.append((note(rng, place, name, locker), name, locker))
        if len(window) == documents:
            left = list(range(documents))
            for _ in range(min(questions, documents)):
                asked = left.pop(rng.randrange(len(left)))
                yield _asked([text for text, _, _ in window], asked, *window[asked][1:])


def _asked(notes: Sequence[str], asked: int, name: str, locker: str) -> LabelledRequest:
    return LabelledRequest(
        documents=tuple(notes),
        query=f"Question: What is the locker number of {name}?\nAnswer:",
        answer_prefix=f" {start(name)}",
        expected=locker,
        spans=(fact(notes, asked, name, locker),),
        instruction=INSTRUCTION,
    )
