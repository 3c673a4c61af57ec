"""Pre-roll: what the next window needs, computed in the agent's idle time.

Between calls the next window is known up to its new document: today's minus the oldest. Its segments are
computed by the same canonical passes as everything else: all of them, each after all that precede it, so that
what is there when the next call comes is a longer exact prefix, and a complete pre-roll leaves only the new
document and the query to compute; or only those that the conditioning computes anew when the window slides,
and what the new document is computed after, which changes no answer. A wrong guess costs nothing but the idle
time: what the next window shares with the guess is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event, Lock, Thread

MAKE_WAY = 0.002  # seconds that a waiting request is left to take its turn


@dataclass(frozen=True, slots=True)
class PrerollReport:
    """What a pre-roll did.

    Args:
        segments: that are now at hand, of the `of` that the predicted window needs.
        computed: tokens of passes that were run for it.
    """

    segments: int
    of: int
    computed: int

    @property
    def complete(self) -> bool:
        return self.segments == self.of


class BackgroundPreroll:
    """Runs steps of a pre-roll in a thread of its own, and makes way for requests.

    Args:
        step: computes one segment under the session's lock; False when nothing is left, or no longer wanted.
        wanted: whether a request waits for the lock, or an answer is decoded.
    """

    def __init__(self, step: Callable[[], bool], *, wanted: Callable[[], bool]) -> None:
        self._step = step
        self._wanted = wanted
        self._stopping = Event()
        self._lock = Lock()
        self._asked = False
        self._thread: Thread | None = None

    def start(self) -> None:
        """Goes on with the prediction that holds now; a running thread looks again when it is done."""
        with self._lock:
            self._asked = True
            if self._thread is None and not self._stopping.is_set():
                self._thread = Thread(target=self._run, name="rolling-kv-preroll", daemon=True)
                self._thread.start()

    def ask_to_stop(self) -> None:
        """The segment in the making is given up, and no other one is begun."""
        self._stopping.set()

    def join(self) -> None:
        """Waits for the thread to end."""
        thread = self._thread
        if thread is not None:
            thread.join()

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._stopping.is_set() or not self._asked:
                    self._thread = None
                    return
                self._asked = False
            more = True
            while more and not self._stopping.is_set():
                if self._wanted():
                    time.sleep(MAKE_WAY)
                else:
                    more = self._step()
