"""A registry: names to factories, never a shared instance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from rolling_kv.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps a name to a factory; an unknown name lists the known ones.

    Args:
        kind: what is registered, as it reads in an error ("recompute policy").
        error: the exception raised for an unknown name.
    """

    def __init__(self, kind: str, error: type[ConfigError] = ConfigError) -> None:
        self._kind = kind
        self._error = error
        self._factories: dict[str, Callable[[], T]] = {}

    def register(self, name: str, factory: Callable[[], T]) -> None:
        if name in self._factories:
            raise ValueError(f"{self._kind} {name!r} is registered twice")
        self._factories[name] = factory

    def create(self, name: str) -> T:
        factory = self._factories.get(name)
        if factory is None:
            raise self._error(f"Unknown {self._kind} {name!r}. Known ones: {', '.join(self)}.")
        return factory()

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._factories))

    def __contains__(self, name: object) -> bool:
        return name in self._factories
