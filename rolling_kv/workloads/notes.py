"""What notes are made of: people and numbers, none twice in a request.

The notes are worded so that very small base models answer them: few kinds of words, one number a note, and an
answer that begins as the note does.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from rolling_kv.errors import ConfigError
from rolling_kv.workloads.request import TextSpan

INSTRUCTION = "Read the notes."

_FIRST_NAMES = (
    *("Alice", "Bob", "Carol", "David", "Emma", "Frank", "Grace", "Henry"),
    *("Irene", "Jack", "Karen", "Leo", "Maria", "Nathan", "Olivia", "Peter"),
    *("Quinn", "Rachel", "Samuel", "Tina", "Victor", "Wendy", "Xavier", "Yvonne"),
    *("Adam", "Brenda", "Charles", "Diana", "Edward", "Fiona", "George", "Helen"),
    *("Ivan", "Julia", "Kevin", "Laura", "Martin", "Nancy", "Oscar", "Paula"),
    *("Robert", "Sarah", "Thomas", "Ursula", "Vincent", "Walter", "Anna", "Brian"),
    *("Chloe", "Daniel", "Esther", "Felix", "Gloria", "Hugo", "Isabel", "James"),
    *("Kate", "Lucas", "Monica", "Norman", "Pamela", "Ralph", "Sylvia", "Tony"),
    *("Veronica", "William", "Zoe", "Arthur", "Beth", "Claire", "Derek", "Elena"),
    *("Gary", "Hannah", "Ian", "Jane", "Keith", "Linda", "Mark", "Nina"),
    *("Oliver", "Philip", "Rita", "Simon", "Teresa", "Vera", "Wayne", "Amy"),
    *("Bruce", "Cindy", "Dennis", "Eric", "Gina", "Harold", "Iris", "Jonas"),
)
_LAST_NAMES = (
    *("Adams", "Baker", "Carter", "Dixon", "Evans"),
    *("Foster", "Grant", "Harris", "Jensen", "Keller"),
)
PLACES = (
    *("Paris", "Rome", "Cairo", "Lima", "Oslo", "Delhi", "Tokyo", "Sydney"),
    *("Boston", "Dallas", "Berlin", "Madrid", "Vienna", "Prague", "Athens", "Dublin"),
)

MOST_DOCUMENTS = 900  # as many as there are numbers of three digits


def people(rng: random.Random, count: int) -> list[str]:
    """`count` different people: by first name while there are enough of those, otherwise by full name."""
    firsts, lasts = _shuffled(rng, _FIRST_NAMES), _shuffled(rng, _LAST_NAMES)
    if count <= len(firsts):
        return firsts[:count]
    names = []
    for index in range(count):
        turn, first = divmod(index, len(firsts))
        names.append(f"{firsts[first]} {lasts[(first + turn) % len(lasts)]}")
    return names


def _shuffled(rng: random.Random, words: Sequence[str]) -> list[str]:
    return rng.sample(words, len(words))


def numbers(rng: random.Random, count: int) -> list[str]:
    """`count` different numbers of three digits."""
    return [str(number) for number in rng.sample(range(100, 1000), count)]


def note(rng: random.Random, place: int, name: str, number: str) -> str:
    """Note `place` (from 0), about 20 tokens, which ends with `number` and a full stop.

    Notes are numbered because gemma3-270m answers far fewer of them otherwise.
    """
    return f"Note {place + 1}: {name} lives in {rng.choice(PLACES)}. {start(name)} {number}."


def start(name: str) -> str:
    """How a note goes on to its number, and how an answer begins."""
    return f"The locker number of {name} is"


def last_words(notes: Sequence[str], place: int, words: str) -> TextSpan:
    """The span of `words`, with which note `place` ends, without its full stop."""
    stop = len(notes[place]) - 1
    return TextSpan(place, stop - len(words), stop)


def fact(notes: Sequence[str], place: int, name: str, number: str) -> TextSpan:
    """The span of key and value of note `place`, as "Alice is 123": what a query has to find."""
    return last_words(notes, place, f"{name} is {number}")


def require_documents(documents: int, *, least: int) -> None:
    """ConfigError unless there are at least `least` documents and not more than there are numbers."""
    if not least <= documents <= MOST_DOCUMENTS:
        raise ConfigError(f"documents is {documents}; expected {least} to {MOST_DOCUMENTS}.")
