"""Needle requests: short notes, of which one is asked for its number (RULER's single-key needle)."""

from __future__ import annotations

import random
from collections.abc import Iterator

from rolling_kv.workloads.notes import (
    INSTRUCTION,
    fact,
    note,
    numbers,
    people,
    require_documents,
    start,
)
from rolling_kv.workloads.request import LabelledRequest


def needle_requests(seed: int, *, documents: int) -> Iterator[LabelledRequest]:
    """The endless requests of `seed`: `documents` fresh notes of about 20 tokens, one of them asked.

    Every note has a person and a number of its own; the asked note is anywhere, uniformly, and its span is
    the key and the value, as "Alice is 123". ConfigError for fewer than one document or more than 900.
    """
    require_documents(documents, least=1)
    return _requests(random.Random(f"needle:{seed}"), documents)


def _requests(rng: random.Random, documents: int) -> Iterator[LabelledRequest]:
    while True:
        names, lockers = people(rng, documents), numbers(rng, documents)
        notes = tuple(note(rng, place, names[place], lockers[place]) for place in range(documents))
        asked = rng.randrange(documents)
        yield LabelledRequest(
            documents=notes,
            query=f"Question: What is the locker number of {names[asked]}?\nAnswer:",
            answer_prefix=f" {start(names[asked])}",
            expected=lockers[asked],
            spans=(fact(notes, asked, names[asked], lockers[asked]),),
            instruction=INSTRUCTION,
        )
