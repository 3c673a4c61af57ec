"""How long a run still takes, from what its steps took so far."""

from __future__ import annotations

from collections.abc import Callable


class Remaining:
    """Counts steps of several kinds, each with a mean of its own; of a kind not seen yet, the mean of all.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = clock()
        self._left: dict[str, int] = {}
        self._taken: dict[str, list[float]] = {}  # kind -> [steps, seconds]

    def expect(self, kind: str, steps: int) -> None:
        """So many more steps of a kind will come."""
        self._left[kind] = self._left.get(kind, 0) + steps

    def begin(self) -> None:
        """What passed since the last step is no part of the next."""
        self._since = self._clock()

    def took(self, kind: str) -> None:
        """A step of a kind has just ended."""
        now = self._clock()
        taken = self._taken.setdefault(kind, [0.0, 0.0])
        taken[0] += 1
        taken[1] += now - self._since
        self._left[kind] -= 1
        self._since = now

    @property
    def done(self) -> int:
        return int(sum(steps for steps, _ in self._taken.values()))

    @property
    def total(self) -> int:
        return self.done + sum(self._left.values())

    def seconds(self) -> float | None:
        """What is left; None while nothing is known."""
        if not self._taken:
            return None
        mean = sum(spent for _, spent in self._taken.values()) / self.done
        return sum(left * self._mean(kind, mean) for kind, left in self._left.items())

    def estimate(self) -> str:
        """The same for people; empty while nothing is known, or nothing is left."""
        seconds = self.seconds()
        if not seconds:
            return ""
        if seconds < 90:
            return f"{max(1, round(seconds))} s"
        return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

    def _mean(self, kind: str, otherwise: float) -> float:
        steps, spent = self._taken.get(kind, [0.0, 0.0])
        return spent / steps if steps else otherwise
