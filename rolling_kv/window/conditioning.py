"""Conditioning: which earlier segments a stored segment was computed after (deterministic modes only).

| mode          | a document's KV is computed after                                            |
|---------------|------------------------------------------------------------------------------|
| `isolated`    | nothing                                                                      |
| `instruction` | the instruction                                                              |
| `window:k`    | the instruction and the k documents before it in the current window          |

All three are functions of the prompt alone, which is what makes answers independent of history.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rolling_kv.errors import UnknownConditioningError
from rolling_kv.window.layout import Segment

_MODES = "isolated, instruction, window:k (k documents, for example window:3)"


@dataclass(frozen=True, slots=True)
class Conditioning:
    """A parsed mode: whether the instruction is seen, and how many neighbours."""

    name: str
    sees_instruction: bool
    neighbours: int

    def context(self, segments: Sequence[Segment], index: int) -> tuple[int, ...]:
        """Indices, ascending, of the segments that segment `index` is computed after.

        `segments` are those of a prompt: at most one instruction, first, then documents.
        """
        if segments[index].kind == "instruction":
            return ()
        instruction = (0,) if segments[0].kind == "instruction" else ()
        first_neighbour = max(len(instruction), index - self.neighbours)
        seen = instruction if self.sees_instruction else ()
        return seen + tuple(range(first_neighbour, index))


def parse_conditioning(mode: str) -> Conditioning:
    """Parses `isolated`, `instruction` or `window:k` (k >= 1).

    Raises:
        UnknownConditioningError: anything else.
    """
    if mode == "isolated":
        return Conditioning(name=mode, sees_instruction=False, neighbours=0)
    if mode == "instruction":
        return Conditioning(name=mode, sees_instruction=True, neighbours=0)
    neighbours = re.fullmatch(r"window:([1-9][0-9]{0,5})", mode) if isinstance(mode, str) else None
    if neighbours is None:
        raise UnknownConditioningError(f"Unknown conditioning {mode!r}. Known ones: {_MODES}.")
    return Conditioning(name=mode, sees_instruction=True, neighbours=int(neighbours[1]))
