"""Stitched KV: the KV of a request, put together from segments at the request's positions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

import torch

from rolling_kv.engine.ahead import Ahead, Promise
from rolling_kv.engine.buffers import Buffers
from rolling_kv.engine.kernels import remap_keys
from rolling_kv.engine.rope import Rope, Rotation
from rolling_kv.kv import SegmentKV


@dataclass(frozen=True, slots=True)
class PlacedKV:
    """A segment's KV and the request position of its first token; `tokens`: only these of it, ascending."""

    kv: SegmentKV
    position: int
    tokens: torch.Tensor | None = None

    @property
    def offsets(self) -> torch.Tensor:
        return torch.arange(len(self.kv)) if self.tokens is None else self.tokens

    def taken(self, stored: torch.Tensor) -> torch.Tensor:
        """Of `stored` [kv_heads, tokens, head_dim], the tokens that are placed."""
        return stored if self.tokens is None else stored[:, self.tokens]


class StitchedKV:
    """One buffer of keys and one of values a layer, filled when the layer is first asked for.

    Args:
        placed: what is stored, in ascending positions.
        capacity: slots in the buffers; those that nothing is placed in stay zero until a pass fills them.
        rope: moves the keys.
        buffers: where memory comes from on a CPU.
        packed: placed tokens lie in slots 0, 1, 2, ... in their order, instead of at their positions.
        ahead: fills the layer after one that is asked for meanwhile. The bits are the same.
        clock: seconds; `seconds` adds up what callers waited for layers.
    """

    def __init__(
        self,
        placed: Sequence[PlacedKV],
        *,
        capacity: int,
        rope: Rope,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        buffers: Buffers,
        packed: bool = False,
        ahead: Ahead | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._placed = list(placed)
        self._shape = (1, kv_heads, capacity, head_dim)
        self._rope = rope
        self._dtype = dtype
        self._device = device
        self._buffers = buffers
        self._clock = clock
        started = clock()
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._ahead = ahead
        self._promised: dict[int, Promise] = {}
        self._filling = Lock()  # of the room that layers share while they are filled
        self.positions = _concatenated([part.position + part.offsets for part in placed]).to(device)
        self._slots = torch.arange(len(self.positions), device=device) if packed else self.positions
        self._filled = _as_slice(self._slots)
        self._scratch: torch.Tensor | None = None
        self._moved = any(part.position != part.kv.start for part in placed)
        self._rotations: list[Rotation] = []
        if self._moved:
            stored = _concatenated([part.kv.start + part.offsets for part in placed]).to(device)
            self._rotations = rope.rotations(stored, self.positions)
        self.seconds = clock() - started

    @property
    def capacity(self) -> int:
        return self._shape[2]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, each [1, kv_heads, capacity, head_dim], to write into."""
        if index not in self._layers:
            started = self._clock()
            promised = self._promised.pop(index, None)
            self._layers[index] = self._fill(index) if promised is None else promised.get()
            self.seconds += self._clock() - started
        self._begin(index + 1)
        return self._layers[index]

    def _begin(self, index: int) -> None:
        """Has a layer filled while something else runs, unless it is, or nothing is to be done ahead."""
        past = index >= len(self._rope.layer_table)
        if self._ahead is None or past or index in self._layers or index in self._promised:
            return
        self._promised[index] = self._ahead.make(lambda: self._fill(index))

    def stored_keys(self, index: int) -> torch.Tensor:
        """The keys of a layer as stitched, [1, kv_heads, capacity, head_dim], whatever passes wrote since."""
        with _ordinary_tensors(), self._filling:
            keys = self._buffer()
            if self._placed:
                self._place_keys(index, keys[0])
            return keys

    def _fill(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        with _ordinary_tensors(), self._filling:
            keys, values = self._buffer(), self._buffer()
            if self._placed:
                self._place_keys(index, keys[0])
                self._place_values(index, values[0])
            return keys, values

    def _buffer(self) -> torch.Tensor:
        """Room for the keys or values of a layer; zero in the slots that nothing is placed in."""
        buffer = self._room(self._shape)
        if self._filled is None:
            return buffer.zero_()
        buffer[:, :, : self._filled.start] = 0
        buffer[:, :, self._filled.stop :] = 0
        return buffer

    def _room(self, shape: tuple[int, ...]) -> torch.Tensor:
        if self._device.type == "cpu":
            return self._buffers.take(shape, self._dtype)
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _place_keys(self, index: int, keys: torch.Tensor) -> None:
        """Into `keys` [kv_heads, capacity, head_dim], rotated to where they are now."""

        def stored(part: PlacedKV) -> torch.Tensor:
            return part.kv.k[index]

        filled = self._filled
        if self._moved:
            cos, sin = self._rotations[self._rope.layer_table[index]]
            # Elsewhere streams would have to take turns with it.
            if self._scratch is None and self._device.type == "cpu":
                self._scratch = self._room((self._shape[1], len(self._slots), self._shape[3]))
            joined = self._joined(stored, out=self._scratch)
            if filled is None:
                remap_keys(joined, cos, sin, out=keys, slots=self._slots)
            else:
                remap_keys(joined, cos, sin, out=keys[:, filled])
        elif filled is None:
            keys.index_copy_(1, self._slots, self._joined(stored))
        else:
            self._joined(stored, out=keys[:, filled])

    def _place_values(self, index: int, values: torch.Tensor) -> None:
        if self._filled is None:
            values.index_copy_(1, self._slots, self._joined(lambda part: part.kv.v[index]))
        else:
            self._joined(lambda part: part.kv.v[index], out=values[:, self._filled])

    def _joined(
        self, stored: Callable[[PlacedKV], torch.Tensor], *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The placed tokens of all segments, [kv_heads, tokens, head_dim], wherever each is kept."""
        taken = [part.taken(stored(part)) for part in self._placed]
        if self._device.type == "cuda" and all(tensor.device.type == "cpu" for tensor in taken):
            tokens = sum(tensor.shape[1] for tensor in taken)
            pinned = torch.empty(
                (self._shape[1], tokens, self._shape[3]), dtype=self._dtype, pin_memory=True
            )  # one copy that nothing waits for, instead of one a segment
            moved = torch.cat(taken, dim=1, out=pinned).to(self._device, non_blocking=True)
            return moved if out is None else out.copy_(moved)
        return torch.cat([tensor.to(self._device) for tensor in taken], dim=1, out=out)


@contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """What is made here can be written to both in and out of inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _as_slice(slots: torch.Tensor) -> slice | None:
    """`slots`, ascending, as a slice when they stand side by side."""
    if len(slots) == 0:
        return slice(0, 0)
    first, last = int(slots[0]), int(slots[-1])
    return slice(first, last + 1) if last - first + 1 == len(slots) else None


def _concatenated(runs: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.arange(0), *runs])
