"""Stitched KV: the KV of a request, put together from segments at the request's positions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rolling_kv.engine.kernels import remap_keys
from rolling_kv.engine.rope import Rope, Rotation
from rolling_kv.kv import SegmentKV


@dataclass(frozen=True, slots=True)
class PlacedKV:
    """A segment's KV and the request position of its first token."""

    kv: SegmentKV
    position: int


class StitchedKV:
    """One buffer of keys and one of values a layer, filled when the layer is first asked for.

    Args:
        placed: what is stored, in ascending positions; gaps stay zero until a pass scatters rows into them.
        capacity: positions in the buffers.
        rope: moves the keys.
        clock: seconds; `seconds` adds up what filling took.
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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._placed = [part for part in placed if len(part.kv)]
        self._shape = (1, kv_heads, capacity, head_dim)
        self._rope = rope
        self._dtype = dtype
        self._device = device
        self._clock = clock
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.seconds = 0.0
        self._positions = _positions([(part.position, len(part.kv)) for part in self._placed]).to(device)
        self._moved = any(part.position != part.kv.start for part in self._placed)
        self._rotations: list[Rotation] = []
        if self._moved:
            stored = _positions([(part.kv.start, len(part.kv)) for part in self._placed]).to(device)
            self._rotations = rope.rotations(stored, self._positions)

    @property
    def capacity(self) -> int:
        return self._shape[2]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, each [1, kv_heads, capacity, head_dim]; the caller may write into
        them."""
        if index not in self._layers:
            started = self._clock()
            self._layers[index] = self._fill(index)
            self.seconds += self._clock() - started
        return self._layers[index]

    def replace_layer(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Puts what a pass computed afresh, [1, kv_heads, capacity, head_dim] each, in place of what is
        stored."""
        self._layers[index] = (keys, values)

    def _fill(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        values = torch.zeros(self._shape, dtype=self._dtype, device=self._device)
        if not self._placed:
            return keys, values
        stored = torch.cat([part.kv.k[index] for part in self._placed], dim=1).to(self._device)
        if self._moved:
            cos, sin = self._rotations[self._rope.layer_table[index]]
            stored = remap_keys(stored, cos, sin)
        keys[0].index_copy_(1, self._positions, stored)
        stored = torch.cat([part.kv.v[index] for part in self._placed], dim=1).to(self._device)
        values[0].index_copy_(1, self._positions, stored)
        return keys, values


def _positions(runs: Sequence[tuple[int, int]]) -> torch.Tensor:
    """The positions of runs of (first position, length), one after the other."""
    return torch.cat([torch.arange(0), *(torch.arange(start, start + length) for start, length in runs)])
