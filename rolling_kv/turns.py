"""Turns: calls from several threads, one at a time, and whether somebody waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock, RLock

_LOOK = 0.05  # seconds


class Turns:
    """A lock that a thread may take again, and that knows how many requests wait for it."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._waiting = _Count()
        self._decoding = _Count()

    @property
    def wanted(self) -> bool:
        """Whether a request waits for its turn."""
        return self._waiting.number > 0

    @property
    def occupied(self) -> bool:
        """Whether a request waits for its turn, or somebody is busy: no time for the background."""
        return self.wanted or self._decoding.number > 0

    @contextmanager
    def request(self) -> Iterator[None]:
        """A turn for a request; what runs in the background sees it wait."""
        with self._waiting:
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    def busy(self) -> AbstractContextManager[None]:
        """Time in which nothing is to run in the background, without a turn."""
        return self._decoding

    @contextmanager
    def background(self, *, give_up: Callable[[], bool]) -> Iterator[bool]:
        """A turn for what nobody waits for; False, and no turn, when `give_up` came true before it."""
        while not (taken := self._lock.acquire(timeout=_LOOK)):
            if give_up():
                break
        try:
            yield taken
        finally:
            if taken:
                self._lock.release()


class _Count:
    """How many contexts are open."""

    def __init__(self) -> None:
        self.number = 0
        self._lock = Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.number += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.number -= 1
