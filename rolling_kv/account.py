"""The account of a call: where every prompt token and every second went."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from rolling_kv.answer import Timing, Trace, Usage
from rolling_kv.hooks import Call
from rolling_kv.ingest import IngestReport
from rolling_kv.plan import Plan
from rolling_kv.planner import prerolled_tokens

if TYPE_CHECKING:
    from rolling_kv.call import Prefilled


@dataclass(frozen=True, slots=True)
class Account:
    """Gathers what a call did, for its answer.

    Args:
        call: what was asked.
        plan: of the prompt; its stored segments are those that were used.
        started, ready: when the call began, and when the first token's logits were there.
    """

    call: Call
    plan: Plan
    prefilled: Prefilled
    report: IngestReport
    started: float
    ready: float
    clock: Callable[[], float]

    def usage(self, *, output: int) -> Usage:
        prefilled = self.prefilled
        return Usage(
            prompt_tokens=len(self.plan.prompt),
            prefix=prefilled.prefix,
            reused=prefilled.reused,
            recomputed=len(prefilled.selected),
            computed=prefilled.computed,
            output=output,
            ingested=self.report.computed,
            degraded=tuple(dict.fromkeys(self.report.degraded)),
        )

    def timing(self, *, first_token: float) -> Timing:
        prefilled = self.prefilled
        return Timing(
            ingest=self.report.seconds,
            load=prefilled.load,
            select=prefilled.select,
            fuse=prefilled.fuse,
            first_token=first_token,
            ttft=self.ready - self.started + first_token,
            total=self.clock() - self.started,
        )

    def trace(self, *, margins: Sequence[float] = ()) -> Trace:
        logits = self.prefilled.logits.cpu().numpy()
        return Trace(
            lineages=tuple(part.lineage.key for part in self.plan.stored),
            selected=self.prefilled.selected,
            selection=self.prefilled.stats(),
            logits_fingerprint=xxhash.xxh3_128_hexdigest(logits.tobytes()),
            prerolled=prerolled_tokens(self.plan),
            margins=tuple(margins),
        )
