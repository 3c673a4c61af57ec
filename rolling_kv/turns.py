"""Turns: calls from several threads, one at a time, and whether somebody waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, RLock


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
        with self._counting:
            self._waiting += 1
        try:
            self._lock.acquire()
        finally:
            with self._counting:
                self._waiting -= 1
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def background(self) -> Iterator[None]:
        """A turn for what nobody waits for."""
        with self._lock:
            yield
