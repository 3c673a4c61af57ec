"""Orders: in which sequence the requests of a history are replayed."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from rolling_kv.errors import ConfigError
from rolling_kv.replay.runs import CHRONOLOGICAL, CONTROLS

REVERSED = "reversed"
_KNOWN = "chronological, reversed, random:<seed>, or a file that lists request numbers"


@dataclass(frozen=True, slots=True)
class Order:
    """The requests, by number, in the sequence in which they are replayed; some may be left out."""

    name: str
    requests: tuple[int, ...]

    @classmethod
    def of(cls, name: str, requests: Sequence[int], *, count: int) -> Order:
        """An order of the user's own, of a history of `count` requests.

        Raises:
            ConfigError: a request is not in the history, or stands in it twice, or the name is that of a
                control.
        """
        if name in CONTROLS:
            raise ConfigError(f"{name!r} is the name of a control; call the order something else.")
        for number in requests:
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count:
                raise ConfigError(
                    f"The order {name!r} names the request {number!r}; expected 0 to {count - 1}."
                )
        if len(set(requests)) != len(requests) or not requests:
            raise ConfigError(f"The order {name!r} holds no request, or one of them twice.")
        return cls(name, tuple(requests))


def parse_orders(text: str, *, count: int, seed: int = 0) -> tuple[Order, ...]:
    """Orders as the command line has them: how many, or their names with commas between.

    Args:
        text: a number N for chronological, reversed and N - 2 random ones; or names, each chronological,
            reversed, random:<seed>, or the path of a file with request numbers (a JSON list, or white space
            between).
        count: requests in the history.
        seed: of the first random order.

    Raises:
        ConfigError
    """
    stripped = text.strip()
    if re.fullmatch(r"\d+", stripped):
        total = int(stripped)
        if total < 1:
            raise ConfigError("orders is 0; expected at least 1, and 2 to compare answers between orders.")
        names = [CHRONOLOGICAL, REVERSED, *(f"random:{seed + extra}" for extra in range(total - 2))][:total]
    else:
        names = [name.strip() for name in stripped.split(",")]
    orders = tuple(_parsed(name, count=count) for name in names)
    repeated = sorted({order.name for order in orders if [one.name for one in orders].count(order.name) > 1})
    if repeated:
        raise ConfigError(f"The order {repeated[0]!r} is named twice; name each once.")
    return orders


def _parsed(name: str, *, count: int) -> Order:
    numbers = list(range(count))
    if name == CHRONOLOGICAL:
        return Order(name, tuple(numbers))
    if name == REVERSED:
        return Order(name, tuple(reversed(numbers)))
    if seed := re.fullmatch(r"random:(-?\d{1,18})", name):
        random.Random(f"order:{int(seed[1])}").shuffle(numbers)
        return Order(f"random:{int(seed[1])}", tuple(numbers))
    path = Path(name).expanduser()
    if not name or name in CONTROLS or not path.is_file():
        hint = " Controls have an option of their own." if name in CONTROLS else ""
        raise ConfigError(f"Unknown order {name!r}. Expected {_KNOWN}.{hint}")
    found = _numbers(path)
    digest = xxhash.xxh3_64_hexdigest(json.dumps(found).encode())[:8]
    return Order.of(f"{path.stem}-{digest}", found, count=count)


def _numbers(path: Path) -> list[int]:
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if text.lstrip().startswith("[") else [int(one) for one in text.split()]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} lists no request numbers: {error}. Expected [0, 2, 1], or white space between."
        ) from error
    return list(found)
