"""Tasks in the manner of RULER (Hsieh et al., 2024) whose answer stands in several documents.

RULER's multi-query and multi-value needles, and its variable tracking, over notes of one form: every note
that does not answer distracts. Numbers are listed in the order asked for; without one of
them the answer is wrong.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from rolling_kv.errors import ConfigError
from rolling_kv.workloads.notes import INSTRUCTION, fact, last_words, note, numbers, people, require_documents
from rolling_kv.workloads.request import LabelledRequest

_COUNTS = {2: "two", 3: "three", 4: "four", 5: "five"}


def multi_query_requests(seed: int, *, documents: int, keys: int = 2) -> Iterator[LabelledRequest]:
    """The endless requests of `seed`: the numbers of `keys` people are asked in one query.

    Spans are key and value of each, in the order asked for. ConfigError when `keys` is not 2 to 5 or there
    are fewer documents than that.
    """
    _require_count("keys", keys)
    require_documents(documents, least=keys)
    return _multi_query(random.Random(f"multi-query:{seed}"), documents, keys)


def _multi_query(rng: random.Random, documents: int, keys: int) -> Iterator[LabelledRequest]:
    while True:
        names, lockers = people(rng, documents), numbers(rng, documents)
        notes = [note(rng, place, names[place], lockers[place]) for place in range(documents)]
        asked = rng.sample(range(documents), keys)
        who = _listed([names[place] for place in asked])
        yield LabelledRequest(
            documents=tuple(notes),
            query=f"Question: What are the locker numbers of {who}?\nAnswer:",
            answer_prefix=f" The locker numbers of {who} are",
            expected=_listed([lockers[place] for place in asked]),
            spans=tuple(fact(notes, place, names[place], lockers[place]) for place in asked),
            instruction=INSTRUCTION,
        )


def multi_value_requests(seed: int, *, documents: int, values: int = 2) -> Iterator[LabelledRequest]:
    """The endless requests of `seed`: one person has `values` numbers, in as many notes; all are asked.

    Spans are key and value of each, in the order of the notes, as the answer lists them. ConfigError when
    `values` is not 2 to 5 or there are fewer documents than that.
    """
    _require_count("values", values)
    require_documents(documents, least=values)
    return _multi_value(random.Random(f"multi-value:{seed}"), documents, values)


def _multi_value(rng: random.Random, documents: int, values: int) -> Iterator[LabelledRequest]:
    while True:
        names, lockers = people(rng, documents), numbers(rng, documents)
        asked = sorted(rng.sample(range(documents), values))
        name = names[asked[0]]
        for place in asked:
            names[place] = name
        notes = [note(rng, place, names[place], lockers[place]) for place in range(documents)]
        yield LabelledRequest(
            documents=tuple(notes),
            query=f"Question: What are the {_COUNTS[values]} locker numbers of {name}?\nAnswer:",
            answer_prefix=f" The {_COUNTS[values]} locker numbers of {name} are",
            expected=_listed([lockers[place] for place in asked]),
            spans=tuple(fact(notes, place, name, lockers[place]) for place in asked),
            instruction=INSTRUCTION,
        )


def variable_tracking_requests(seed: int, *, documents: int, links: int = 3) -> Iterator[LabelledRequest]:
    """The endless requests of `seed`: a chain of `links` assignments; its last variable is asked.

    The first assigns a number, each further one the variable before it; chains of the same form distract,
    their assignments between those of the asked one. Every chain is in order. Spans are the asked chain's
    assignments, first to last. ConfigError when `links` is not 2 to 5 or there are fewer documents than that.
    """
    _require_count("links", links)
    require_documents(documents, least=links)
    return _variable_tracking(random.Random(f"variable-tracking:{seed}"), documents, links)


def _variable_tracking(rng: random.Random, documents: int, links: int) -> Iterator[LabelledRequest]:
    while True:
        names, values = people(rng, documents), numbers(rng, documents)
        chains = [place // links for place in range(documents)]  # chain 0 is asked; the last may be shorter
        rng.shuffle(chains)
        assignments: list[str] = []
        last: dict[int, str] = {}  # the variable that each chain has come to
        for chain, name, value in zip(chains, names, values, strict=True):
            assignments.append(f"{name} = {last.get(chain, value)}")
            last[chain] = name
        notes = [f"Note {index}: {assignment}." for index, assignment in enumerate(assignments, start=1)]
        asked = [place for place, chain in enumerate(chains) if chain == 0]
        yield LabelledRequest(
            documents=tuple(notes),
            query=f"Question: Which number is {last[0]}?\nAnswer:",
            answer_prefix=f" {last[0]} =",
            expected=values[asked[0]],
            spans=tuple(last_words(notes, place, assignments[place]) for place in asked),
            instruction=INSTRUCTION,
        )


def _listed(items: Sequence[str]) -> str:
    return f"{', '.join(items[:-1])} and {items[-1]}"


def _require_count(name: str, count: int) -> None:
    if count not in _COUNTS:
        raise ConfigError(f"{name} is {count}; expected 2 to 5.")
