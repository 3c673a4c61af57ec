"""Turns: calls from several threads, one at a time, and whether somebody waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, RLock

_LOOK = 0.05  # seconds


class Turns:
    """A lock that a thread may take again, and that knows how many threads wait for it."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._counting = Lock()
        self._waiting = 0

    @property
    def wanted(self) -> bool:
        """Whether a request waits for its turn."""
        return self._waiting > 0

    @contextmanager
    def request(self) -> Iterator[None]:
        """A turn for a request; what runs in the background sees it wait."""
        with self.busy():
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Counts as waiting, without a turn: nothing in the background runs meanwhile."""
        with self._counting:
            self._waiting += 1
        try:
            yield
        finally:
            with self._counting:
                self._waiting -= 1

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
