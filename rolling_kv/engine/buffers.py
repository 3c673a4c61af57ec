"""Memory of a CPU for stitched KV, taken again by the next call.

Fresh memory costs a page fault every 4 KiB, and the KV of a long window is hundreds of MiB a call. (The
allocator of torch for GPUs does the same for its own.)
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from itertools import count
from math import prod
from threading import Lock

import torch

_SMALL = 1 << 20  # bytes; below that malloc reuses its own


@dataclass(frozen=True, eq=False, slots=True)
class _Block:
    """Memory of `size` bytes."""

    memory: torch.Tensor
    size: int


class Buffers:
    """Gives out buffers, and takes each back by itself once no tensor refers to its memory.

    What is kept and what is given out are together never more than was given out at once.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._idle: deque[_Block] = deque()  # the one that lay longest first
        self._given: dict[int, _Block] = {}
        self._returned: deque[int] = deque()  # filled by finalizers, which must not wait for a lock
        self._numbers = count()
        self._idle_bytes = 0
        self._given_bytes = 0
        self._most = 0

    @property
    def idle_bytes(self) -> int:
        """Kept for the next call."""
        with self._lock:
            self._take_back()
            return self._idle_bytes

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the CPU whose values are undefined."""
        needed = prod(shape) * dtype.itemsize
        if needed < _SMALL:
            return torch.empty(shape, dtype=dtype)
        with self._lock:
            self._take_back()
            block = self._fitting(needed)
            lease = block.memory.numpy()[:needed]  # an object that lives as long as any tensor over it
            number = next(self._numbers)
            self._given[number] = block
            weakref.finalize(lease, self._returned.append, number).atexit = False
            self._given_bytes += block.size
            self._most = max(self._most, self._given_bytes)
            return torch.from_numpy(lease).view(dtype).view(shape)

    def _take_back(self) -> None:
        while self._returned:
            block = self._given.pop(self._returned.popleft())
            self._given_bytes -= block.size
            self._idle.append(block)
            self._idle_bytes += block.size

    def _fitting(self, needed: int) -> _Block:
        fitting = [block for block in self._idle if needed <= block.size <= 2 * needed]
        if fitting:
            best = min(fitting, key=lambda block: block.size)
            self._idle.remove(best)
            self._idle_bytes -= best.size
            return best
        step = 1 << (needed.bit_length() - 4)  # the next prompt may be a little longer
        size = -(-needed // step) * step
        while self._idle and self._idle_bytes + self._given_bytes + size > self._most:
            self._idle_bytes -= self._idle.popleft().size
        return _Block(torch.empty(size, dtype=torch.uint8), size)
