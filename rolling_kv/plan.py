"""The plan of a call: which prompt tokens are exact prefix, reusable, and uncached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rolling_kv.errors import PromptTooLongError
from rolling_kv.store import Lineage
from rolling_kv.window import Conditioning, Prompt, Segment


class LineageOf(Protocol):
    """From a path of token ids, segment by segment, to the lineage of its last segment."""

    def __call__(self, path: Sequence[Sequence[int]], *, gap: int = 0) -> Lineage: ...


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """A segment of the prompt whose KV is stored.

    Args:
        segment: where it stands in the prompt.
        lineages: along its path, each computed after the ones before it; the last is its own.
        exact: whether its path is all that precedes it in the prompt.
        transient: whether its KV is kept in memory only, because the next prompt has no use for it.
        keeps_context: whether what it is computed after is stored as well, because a window may begin there.
    """

    segment: Segment
    lineages: tuple[Lineage, ...]
    exact: bool
    transient: bool = False
    keeps_context: bool = False

    @property
    def lineage(self) -> Lineage:
        return self.lineages[-1]


@dataclass(frozen=True, slots=True)
class Plan:
    """A prompt and its stored segments, in order; all other tokens are uncached."""

    prompt: Prompt
    stored: tuple[StoredSegment, ...]

    @property
    def prefix(self) -> int:
        """Tokens of the exact prefix: leading segments whose KV is what full prefill gives."""
        stop = 0
        for part in self.stored:
            if not part.exact or part.segment.start != stop:
                break
            stop = part.segment.stop
        return stop

    @property
    def query_start(self) -> int:
        """Where the query begins, or the prompt ends."""
        context = self.prompt.context
        return context[-1].stop if context else 0

    @property
    def reusable(self) -> tuple[Segment, ...]:
        """Stored segments after the exact prefix: what a policy chooses from, N tokens together."""
        prefix = self.prefix
        return tuple(part.segment for part in self.stored if part.segment.start >= prefix)

    @property
    def reusable_tokens(self) -> int:
        return sum(len(segment.token_ids) for segment in self.reusable)

    @property
    def reusable_positions(self) -> list[int]:
        """Of the reusable tokens, ascending."""
        return [position for s in self.reusable for position in range(s.start, s.stop)]

    @property
    def computed_positions(self) -> list[int]:
        """Of the uncached tokens, ascending; the query's are the last."""
        stored = {part.segment.start for part in self.stored}
        return [
            position
            for segment in self.prompt.segments
            if segment.start not in stored
            for position in range(segment.start, segment.stop)
        ]


def make_plan(
    prompt: Prompt,
    *,
    conditioning: Conditioning,
    lineage_of: LineageOf,
    sliding_window: int | None = None,
    fresh_tail: int = 0,
    chained: int = 0,
    at_hand: Callable[[Lineage], bool] | None = None,
) -> Plan:
    """Plans a call: which segments have stored KV, and what it was computed after.

    Args:
        sliding_window: of the model's sliding layers; None when it has none, or to pack what a document has
            seen behind the instruction at any distance.
        fresh_tail: so many of the newest documents have no stored KV.
        chained: so many leading segments have KV that was computed after all that precedes them.
        at_hand: under a conditioning that takes KV from fused prompts, whether a document has some.
    """
    context = prompt.context
    documents = [index for index, segment in enumerate(context) if segment.kind == "document"]
    fresh = set(documents[len(documents) - min(fresh_tail, len(documents)) :])
    along = _Along(lineage_of)
    stored = []
    for index, segment in enumerate(context):
        if index in fresh and index >= chained:
            continue
        own = conditioning.path(context, index)
        gap = conditioning.gap(context, index, sliding_window=sliding_window)
        every = [earlier.token_ids for earlier in context[: index + 1]]
        exact = own == every and gap == 0
        if index < chained:
            lineages = along.lineages(every, gap=0)
            stored.append(StoredSegment(segment, lineages, exact=True, transient=not exact))
            continue
        lineages = along.lineages(own, gap=gap)
        if at_hand is not None and segment.kind == "document":
            if not at_hand(lineages[-1]):
                continue
            exact = False
        keeps_context = conditioning.has_edge and gap == 0
        stored.append(StoredSegment(segment, lineages, exact=exact, keeps_context=keeps_context))
    return Plan(prompt=prompt, stored=tuple(stored))


class _Along:
    """The lineages along a path; those of a path that goes on from the last one are not made again."""

    def __init__(self, lineage_of: LineageOf) -> None:
        self._lineage_of = lineage_of
        self._last: tuple[list[tuple[int, ...]], int, tuple[Lineage, ...]] = ([], 0, ())

    def lineages(self, path: list[tuple[int, ...]], *, gap: int) -> tuple[Lineage, ...]:
        last, last_gap, made = self._last
        known = made if gap == last_gap and path[: len(last)] == last else ()
        made = known + tuple(
            self._lineage_of(path[: length + 1], gap=gap) for length in range(len(known), len(path))
        )
        self._last = (path, gap, made)
        return made


def require_positions(prompt: Prompt, *, room: int, positions: int, model: str) -> None:
    """Checks that `prompt` and `room` more tokens fit into the `positions` of `model`.

    Raises:
        PromptTooLongError: they do not; it says how many of the documents would.
    """
    if len(prompt) + room <= positions:
        return
    documents = [segment for segment in prompt.segments if segment.kind == "document"]
    left = positions - room - len(prompt) + sum(len(segment.token_ids) for segment in documents)
    fitting = 0
    for segment in reversed(documents):  # the newest ones, as eviction would leave them
        left -= len(segment.token_ids)
        if left < 0:
            break
        fitting += 1
    raise PromptTooLongError(
        f"The prompt has {len(prompt)} tokens and the answer may take {room} more; the model {model!r} has "
        f"{positions} positions. Of the {len(documents)} documents in the window the newest {fitting} would "
        f"fit. Open the session with window={max(fitting, 1)} or window_tokens=, evict documents, or lower "
        "max_new_tokens."
    )
