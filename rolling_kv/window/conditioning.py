"""Conditioning: which earlier segments a stored segment was computed after.

| mode          | a document's KV is computed after                                                    |
|---------------|--------------------------------------------------------------------------------------|
| `isolated`    | nothing                                                                              |
| `instruction` | the instruction                                                                      |
| `window:k`    | the instruction and the k documents before it in the current window                  |
| `full`        | everything before it in the current window: exact, and a slide computes all anew     |
| `stream:k`    | the instruction and the k documents before it in the stream, evicted ones included   |
| `first-seen`  | whatever preceded it in the first request that held it, as it was fused then         |
| `write-back`  | the last fused prompt that held it                                                   |

The first four are functions of the prompt alone: the deterministic contract. The others depend on what came
before; `first-seen` is what caches in use do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rolling_kv.errors import UnknownConditioningError
from rolling_kv.window.layout import Segment

_MODES = "isolated, instruction, window:k (k documents, as window:3), full, stream:k, first-seen, write-back"


@dataclass(frozen=True, slots=True)
class Conditioning:
    """A parsed mode.

    Args:
        sees_instruction: whether a document's KV has seen the instruction.
        neighbours: how many documents before it its KV has seen; None: all.
        stream: neighbours are those of the stream, not those of the window.
        fused: whether KV is taken from fused prompts: `never`, only the `first` time, or `always` anew.
    """

    name: str
    sees_instruction: bool = True
    neighbours: int | None = 0
    stream: bool = False
    fused: Literal["never", "first", "always"] = "never"

    @property
    def deterministic(self) -> bool:
        """Whether KV is a function of the prompt alone."""
        return not self.stream and self.fused == "never"

    @property
    def has_edge(self) -> bool:
        """Whether the first documents of the window are computed after fewer documents than the others."""
        return bool(self.neighbours) and not self.stream

    def context(self, segments: Sequence[Segment], index: int) -> tuple[int, ...]:
        """Indices, ascending, of the segments that segment `index` is computed after.

        `segments` are those of a prompt: at most one instruction, first, then documents.
        """
        if segments[index].kind == "instruction":
            return ()
        instruction = (0,) if segments[0].kind == "instruction" else ()
        count = index if self.neighbours is None or self.stream else self.neighbours
        seen = instruction if self.sees_instruction else ()
        if self.stream:
            return seen
        return seen + tuple(range(max(len(instruction), index - count), index))

    def path(self, segments: Sequence[Segment], index: int) -> list[tuple[int, ...]]:
        """Token ids of what segment `index` is computed after, in order, and of itself."""
        seen = [segments[i].token_ids for i in self.context(segments, index)]
        if self.stream and self.neighbours:
            seen += segments[index].stream[-self.neighbours :]
        return [*seen, segments[index].token_ids]

    def gap(self, segments: Sequence[Segment], index: int, *, sliding_window: int | None) -> int:
        """Positions left free between the instruction and the neighbours of segment `index`.

        Layers that slide no longer see the instruction from further in than their window. There the
        neighbours are computed a window away from it; nearer to it they are packed behind it.

        Args:
            sliding_window: of the model's sliding layers, in tokens; None when it has none.
        """
        path = self.path(segments, index)
        if (
            sliding_window is None
            or not self.sees_instruction
            or segments[0].kind != "instruction"
            or not index
        ):
            return 0
        first = segments[index].start - sum(
            len(ids) for ids in path[1:-1]
        )  # of the neighbours, in the prompt
        return sliding_window if first - len(segments[0].token_ids) >= sliding_window else 0


def parse_conditioning(mode: str) -> Conditioning:
    """Parses the name of a mode.

    Raises:
        UnknownConditioningError: there is none of that name.
    """
    plain = {
        "isolated": Conditioning(name="isolated", sees_instruction=False),
        "instruction": Conditioning(name="instruction"),
        "full": Conditioning(name="full", neighbours=None),
        "first-seen": Conditioning(name="first-seen", sees_instruction=False, fused="first"),
        "write-back": Conditioning(name="write-back", sees_instruction=False, fused="always"),
    }
    if mode in plain:
        return plain[mode]
    numbered = re.fullmatch(r"(window|stream):([1-9][0-9]{0,5})", mode) if isinstance(mode, str) else None
    if numbered is None:
        raise UnknownConditioningError(f"Unknown conditioning {mode!r}. Known ones: {_MODES}.")
    return Conditioning(name=mode, neighbours=int(numbered[2]), stream=numbered[1] == "stream")
