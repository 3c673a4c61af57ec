"""Memory of this process without the page cache: what it allocated, not the files that it has mapped."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from rolling_kv.errors import BenchError

_SMAPS = Path("/proc/self/smaps_rollup")
_EVERY = 0.02  # seconds


def anonymous_bytes() -> int:
    """Bytes of anonymous memory (`Anonymous` in /proc/self/smaps_rollup): mapped files do not count.

    Raises:
        BenchError: the system does not say.
    """
    try:
        lines = _SMAPS.read_text(encoding="ascii").splitlines()
    except OSError as error:
        raise BenchError(
            f"Memory cannot be measured here: {_SMAPS} is not there. Pass --no-memory."
        ) from error
    kilobytes = next(line.split()[1] for line in lines if line.startswith("Anonymous:"))
    return int(kilobytes) * 1024


class PeakMemory:
    """The largest `anonymous_bytes` while the context lasts, looked at every 20 ms: that takes time."""

    def __init__(self) -> None:
        self.peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self.peak = anonymous_bytes()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self.peak = max(self.peak, anonymous_bytes())

    def _watch(self) -> None:
        while not self._ended.wait(_EVERY):
            self.peak = max(self.peak, anonymous_bytes())
