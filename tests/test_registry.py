"""The registry: names to factories, never a shared instance."""

from __future__ import annotations

import pytest

from rolling_kv.errors import ConfigError, UnknownPolicyError
from rolling_kv.registry import Registry


def test_every_call_makes_another_instance() -> None:
    registry: Registry[list[int]] = Registry("list")
    registry.register("empty", list)
    one, other = registry.create("empty"), registry.create("empty")
    one.append(1)
    assert other == []


def test_names_are_listed_in_order() -> None:
    registry: Registry[int] = Registry("number")
    for name in ("two", "one", "three"):
        registry.register(name, int)
    assert list(registry) == ["one", "three", "two"]
    assert "one" in registry
    assert "four" not in registry
    assert 1 not in registry


@pytest.mark.parametrize("error", [ConfigError, UnknownPolicyError])
def test_an_unknown_name_lists_the_known_ones(error: type[ConfigError]) -> None:
    registry: Registry[int] = Registry("number", error)
    registry.register("two", int)
    registry.register("one", int)
    with pytest.raises(error, match=r"^Unknown number 'zero'\. Known ones: one, two\.$"):
        registry.create("zero")


def test_a_factory_runs_only_when_it_is_asked_for() -> None:
    def fail() -> int:
        raise RuntimeError("made too early")

    registry: Registry[int] = Registry("number")
    registry.register("never", fail)
    assert list(registry) == ["never"]
    with pytest.raises(RuntimeError, match="made too early"):
        registry.create("never")


def test_a_name_is_registered_once() -> None:
    registry: Registry[int] = Registry("number")
    registry.register("one", lambda: 1)
    with pytest.raises(ValueError, match="number 'one' is registered twice"):
        registry.register("one", lambda: 2)
    assert registry.create("one") == 1
