"""Prefilling a plan: ingestion, the scores that its policy needs, and the call itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rolling_kv.config import SessionConfig
from rolling_kv.errors import ConfigError
from rolling_kv.history import FusedHistory
from rolling_kv.ingest import AnchorKind, Ingestor, IngestReport, Progress
from rolling_kv.kv import SegmentKV
from rolling_kv.options import PrefillSettings
from rolling_kv.plan import Plan, StoredSegment
from rolling_kv.policies import create_policy

if TYPE_CHECKING:
    from rolling_kv.call import OnSelected, Prefilled
    from rolling_kv.engine.host import TransformersHost
    from rolling_kv.engine.stitch import PlacedKV


class Prefiller:
    """Brings plans to the first token's logits, for one session.

    Args:
        history: KV from fused prompts, under a conditioning that takes it from there.
    """

    def __init__(
        self,
        *,
        engine: TransformersHost,
        ingestor: Ingestor,
        history: FusedHistory | None,
        config: SessionConfig,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._ingestor = ingestor
        self._history = history
        self._config = config
        self._clock = clock
        self._anchor_kind = AnchorKind(rule=config.anchor_rule, ratio=config.anchor_ratio)

    def ingest(self, plan: Plan, *, progress: Progress | None = None) -> IngestReport:
        """Has the KV of a plan's stored segments at hand, and what the session's policy needs beside it."""
        anchored = any(need.signal == "anchors" for need in create_policy(self._config.policy).needs)
        anchors = self._anchor_kind if anchored and plan.reusable else None  # nothing to choose, no anchors
        return self._ensure(plan, anchors=anchors, progress=progress)[1]

    def prefill(
        self,
        plan: Plan,
        settings: PrefillSettings,
        *,
        labelled: frozenset[int] = frozenset(),
        room: int,
        on_selected: OnSelected | None = None,
    ) -> tuple[Prefilled, IngestReport]:
        """Runs a plan under `settings`.

        Args:
            labelled: prompt positions of the answer, when the request has labels.
            room: tokens that decoding may add.
            on_selected: called with the policy's name and the positions that will be recomputed, ascending.
        """
        from rolling_kv.call import full_prefill, fused_prefill
        from rolling_kv.signals import Signals

        policy = settings.policy
        if not policy.reuses:
            prefilled = full_prefill(plan, engine=self._engine, policy=policy, clock=self._clock)
            return prefilled, IngestReport()
        if self._history is not None and any(need.signal == "anchors" for need in policy.needs):
            raise ConfigError(
                f"{policy.name} needs anchors, and conditioning {self._config.conditioning!r} keeps none. "
                "Use prophetkv, or another conditioning."
            )
        kv, report = self._ensure(plan)
        signals = Signals(
            engine=self._engine,
            plan=plan,
            selection_layer=settings.selection_layer,
            deviation_sample=settings.deviation_sample,
            anchors=lambda: self._placed_anchors(plan, kv, report),
            degraded=report.degraded.append,
        )
        prefilled = fused_prefill(
            plan,
            kv,
            engine=self._engine,
            settings=settings,
            signals=signals,
            labelled=labelled,
            room=room,
            clock=self._clock,
            on_selected=on_selected,
        )
        return prefilled, report

    def _ensure(
        self, plan: Plan, *, anchors: AnchorKind | None = None, progress: Progress | None = None
    ) -> tuple[list[SegmentKV], IngestReport]:
        """The KV of the stored segments: documents' from history where that is how they are conditioned."""
        computed = [part for part in plan.stored if not self._is_fused(part)]
        kv, report = self._ingestor.ensure(computed, anchors=anchors, progress=progress)
        if self._history is None:
            return kv, report
        found = {part.segment.start: one for part, one in zip(computed, kv, strict=True)}
        return [
            self._history[part.lineage.key] if self._is_fused(part) else found[part.segment.start]
            for part in plan.stored
        ], report

    def _is_fused(self, part: StoredSegment) -> bool:
        return self._history is not None and part.segment.kind == "document"

    def _placed_anchors(self, plan: Plan, kv: Sequence[SegmentKV], report: IngestReport) -> list[PlacedKV]:
        import torch

        from rolling_kv.engine.stitch import PlacedKV

        chosen = self._ingestor.anchors(plan.stored, self._anchor_kind, report=report)
        return [
            PlacedKV(kv=one, position=part.segment.start, tokens=torch.tensor(tokens, dtype=torch.int64))
            for part, one, tokens in zip(plan.stored, kv, chosen, strict=True)
        ]
