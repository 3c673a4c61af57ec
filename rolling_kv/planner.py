"""Planning for one session: what its settings make of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rolling_kv.config import SessionConfig
from rolling_kv.history import FusedHistory
from rolling_kv.ingest import Ingestor
from rolling_kv.plan import Plan, StoredSegment, make_plan
from rolling_kv.store import Lineage, make_lineage
from rolling_kv.window import Prompt, parse_conditioning

if TYPE_CHECKING:
    from rolling_kv.kv import ModelIdentity


class Planner:
    """Makes the plans of one session.

    Args:
        sliding_window: of the model's sliding layers, in tokens; None when it has none.
        history: KV from fused prompts, under a conditioning that takes it from there.
    """

    def __init__(
        self,
        *,
        identity: ModelIdentity,
        sliding_window: int | None,
        config: SessionConfig,
        ingestor: Ingestor,
        history: FusedHistory | None,
    ) -> None:
        self._identity = identity
        self._config = config
        self._ingestor = ingestor
        self._history = history
        self._conditioning = parse_conditioning(config.conditioning)
        self._sliding_window = sliding_window if config.positions == "true" else None

    def plan(self, prompt: Prompt) -> Plan:
        """Which tokens of `prompt` are exact prefix, reusable and uncached."""
        history = self._history
        return make_plan(
            prompt,
            conditioning=self._conditioning,
            lineage_of=self._lineage_of,
            sliding_window=self._sliding_window,
            fresh_tail=self._config.fresh_tail,
            chained=self._chained(prompt),
            at_hand=None if history is None else lambda lineage: lineage.key in history,
        )

    def chain(self, segments: Sequence[tuple[int, ...]]) -> list[Lineage]:
        """The lineages of segments that are each computed after all that precede them."""
        return [self._lineage_of(segments[: length + 1]) for length in range(len(segments))]

    def ahead(self, prompt: Prompt) -> list[tuple[Lineage, ...]]:
        """What is needed of a prompt whose last document is still to come: paths, each up to a segment of it.

        Of the one to come these are all segments that it will be computed after.
        """
        last = prompt.context[-1]
        paths = []
        for part in self.plan(prompt).stored:
            if part.segment is last:
                paths += [part.lineages[:length] for length in range(1, len(part.lineages))]
            else:
                paths.append(part.lineages)
        return paths

    def fused_keys(self, prompt: Prompt) -> dict[str, str]:
        """For every document in the prompt, by name, the key of its KV from fused prompts."""
        return {
            segment.name: self._lineage_of([segment.token_ids]).key
            for segment in prompt.context
            if segment.kind == "document"
        }

    def _chained(self, prompt: Prompt) -> int:
        """How many leading segments are exact by the pre-roll: all when calls wait for it, else those there.

        Where all but the last are there, the last one is computed after them as well: it is the new document.
        """
        if self._config.preroll in ("off", "slide"):
            return 0
        context = prompt.context
        if self._config.preroll == "wait":
            return len(context)
        found = self._ingestor.chained(self.chain([segment.token_ids for segment in context]))
        return len(context) if found == len(context) - 1 else found

    def _lineage_of(self, path: Sequence[Sequence[int]], *, gap: int = 0) -> Lineage:
        return make_lineage(self._identity, namespace=self._config.namespace, path=path, gap=gap)


def prerolled_tokens(plan: Plan) -> int:
    """Tokens of the exact prefix that the conditioning alone would not have made exact."""
    prefix = plan.prefix

    def counts(part: StoredSegment) -> bool:
        return part.transient and part.segment.start < prefix

    return sum(len(part.segment.token_ids) for part in plan.stored if counts(part))
