"""Computation counted: the multiplications of a model's passes, the same on every machine."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

if TYPE_CHECKING:
    from rolling_kv.engine.host import PassShape, TransformersHost


class Work:
    """Counts the multiplications of this thread's passes of `engine` while the context lasts.

    Counted are those of tokens with the weights of the layers, and in attention those with the keys and the
    values that a token sees. Left out are logits, rope, and the attention mass that a policy takes of the
    query.

    Args:
        engine: nobody else watches its passes.
    """

    def __init__(self, engine: TransformersHost) -> None:
        self.counted = 0
        self.last = 0  # those of the pass that was counted last
        self._engine = engine
        self._thread = get_ident()
        self._layers = engine.layer_shapes

    def __enter__(self) -> Self:
        self._engine.on_pass = self._add
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.on_pass = None

    def during(self, do: Callable[[], object]) -> int:
        """How many of them `do` makes."""
        before = self.counted
        do()
        return self.counted - before

    def of(self, tokens: int, *, behind: int = 0) -> int:
        """Those of a full prefill of so many tokens, each behind `behind` others."""
        return self._of(torch.arange(behind, behind + tokens), None, None)

    def _add(self, shape: PassShape) -> None:
        if get_ident() != self._thread:  # a pre-roll in the background
            return
        self.last = self._of(shape.rows, shape.positions, shape.last_layer)
        self.counted += self.last

    def _of(self, rows: torch.Tensor, positions: torch.Tensor | None, last_layer: int | None) -> int:
        """Of a pass; it ends with the projections of `last_layer`."""
        seen = {
            window: keys_seen(rows, positions, sliding_window=window)
            for window in {layer.sliding_window for layer in self._layers}
        }
        work = sum(
            len(rows) * layer.weights + 2 * layer.attention_width * seen[layer.sliding_window]
            for layer in self._layers[:last_layer]
        )
        return work if last_layer is None else work + len(rows) * self._layers[last_layer].projections


def keys_seen(rows: torch.Tensor, positions: torch.Tensor | None, *, sliding_window: int | None) -> int:
    """How many keys all rows see together.

    Args:
        rows: [rows], positions.
        positions: [keys], of the keys, ascending; None for 0, 1, 2, ...
    """
    if positions is None:
        keys = rows + 1
        return int((keys if sliding_window is None else keys.clamp(max=sliding_window)).sum())
    keys = torch.searchsorted(positions, rows, right=True)
    if sliding_window is not None:
        keys = keys - torch.searchsorted(positions, rows - sliding_window, right=True)
    return int(keys.sum())
