"""The plan of a call: which prompt tokens are exact prefix, reusable, and uncached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rolling_kv.errors import PromptTooLongError
from rolling_kv.store import Lineage
from rolling_kv.window import Conditioning, Prompt, Segment

LineageOf = Callable[[Sequence[Sequence[int]]], Lineage]
"""From a path of token ids, segment by segment, to the lineage of its last segment."""


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """A segment of the prompt whose KV is stored.

    Args:
        segment: where it stands in the prompt.
        lineages: along its path, each computed after the ones before it; the last is its own.
        exact: whether its path is all that precedes it in the prompt.
    """

    segment: Segment
    lineages: tuple[Lineage, ...]
    exact: bool

    @property
    def lineage(self) -> Lineage:
        return self.lineages[-1]


@dataclass(frozen=True, slots=True)
class Plan:
    """A prompt and its stored segments, in order; what follows them is the query."""

    prompt: Prompt
    stored: tuple[StoredSegment, ...]

    @property
    def prefix(self) -> int:
        """Tokens of the exact prefix: leading segments whose KV is what full prefill gives."""
        stop = 0
        for part in self.stored:
            if not part.exact:
                break
            stop = part.segment.stop
        return stop

    @property
    def query_start(self) -> int:
        return self.stored[-1].segment.stop if self.stored else 0

    @property
    def reusable(self) -> tuple[Segment, ...]:
        """Stored segments after the exact prefix: what a policy chooses from, N tokens together."""
        prefix = self.prefix
        return tuple(part.segment for part in self.stored if part.segment.start >= prefix)

    @property
    def reusable_tokens(self) -> int:
        return self.query_start - self.prefix


def make_plan(prompt: Prompt, *, conditioning: Conditioning, lineage_of: LineageOf) -> Plan:
    """Plans a call: all segments but the query have stored KV, computed after what they may see."""
    context = prompt.context
    stored = []
    for index, segment in enumerate(context):
        seen = conditioning.context(context, index)
        path = [context[i].token_ids for i in seen] + [segment.token_ids]
        lineages = tuple(lineage_of(path[: length + 1]) for length in range(len(path)))
        stored.append(StoredSegment(segment=segment, lineages=lineages, exact=seen == tuple(range(index))))
    return Plan(prompt=prompt, stored=tuple(stored))


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
