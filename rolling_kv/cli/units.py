"""Sizes and ages as people write them."""

from __future__ import annotations

import re

from rolling_kv.errors import ConfigError

_SIZES = {"": 1, "B": 1} | {
    f"{prefix}{'i' if base == 1024 else ''}B": base**power
    for base in (1000, 1024)
    for power, prefix in enumerate("KMGT", start=1)
}
_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def parse_size(text: str) -> int:
    """Bytes of "2GiB" (1024s), "500MB" (1000s) or "4096".

    Raises:
        ConfigError: it is no size.
    """
    units = {unit.upper(): factor for unit, factor in _SIZES.items()}
    number, unit = _parts(text)
    if unit.upper() not in units:
        raise ConfigError(f"{text!r} is no size. Expected a number and a unit, for example 500MB or 2GiB.")
    return int(number * units[unit.upper()])


def parse_age(text: str) -> float:
    """Seconds of "90s", "30m", "12h", "7d" or "2w".

    Raises:
        ConfigError: it is no age.
    """
    number, unit = _parts(text)
    if unit not in _AGES:
        raise ConfigError(
            f"{text!r} is no age. Expected a number and s, m, h, d or w, for example 12h or 7d."
        )
    return number * _AGES[unit]


def _parts(text: str) -> tuple[float, str]:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    return (float(found[1]), found[2]) if found else (0.0, "?")
