"""One call: from a plan to the first token's logits, with its account."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rolling_kv.answer import SelectionStats
from rolling_kv.kv import SegmentKV
from rolling_kv.plan import Plan

if TYPE_CHECKING:
    import torch

    from rolling_kv.engine.host import TransformersHost
    from rolling_kv.engine.stitch import StitchedKV
    from rolling_kv.policies.base import Policy
    from rolling_kv.signals import Signals

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt that is ready to decode.

    Args:
        logits: after the prompt, [vocabulary], float32.
        step: logits after one more token; call it with the tokens of the answer in order.
        selected: positions that were recomputed, ascending.
        prefix, reused, computed: prompt tokens, as in `Usage`.
        load, select, fuse: seconds, as in `Timing`.
    """

    logits: torch.Tensor
    step: Callable[[int], torch.Tensor]
    selected: tuple[int, ...]
    stats: SelectionStats
    prefix: int
    reused: int
    computed: int
    load: float
    select: float
    fuse: float


def full_prefill(plan: Plan, *, engine: TransformersHost, policy: Policy, clock: Clock) -> Prefilled:
    """Computes the whole prompt by the model's stock forward."""
    token_ids = plan.prompt.token_ids
    started = clock()
    logits, cache = engine.stock_prefill(token_ids)
    return Prefilled(
        logits=logits,
        step=lambda token_id: engine.stock_step(cache, token_id),
        selected=(),
        stats=SelectionStats(policy=policy.name, k=0, reusable=0, segments=0, captured_deviation=None),
        prefix=0,
        reused=0,
        computed=len(token_ids),
        load=0.0,
        select=0.0,
        fuse=clock() - started,
    )


def fused_prefill(
    plan: Plan,
    kv: Sequence[SegmentKV],
    *,
    engine: TransformersHost,
    policy: Policy,
    ratio: float,
    signals: Signals,
    room: int,
    clock: Clock,
) -> Prefilled:
    """Stitches the stored KV, selects, and recomputes the selection and the query.

    Args:
        kv: of `plan.stored`, in order.
        ratio: of the reusable tokens to recompute, 0 to 1.
        signals: computes the score that the policy needs.
        room: tokens that decoding may add.
    """
    import torch

    from rolling_kv.engine.stitch import PlacedKV
    from rolling_kv.policies.base import budget

    token_ids = plan.prompt.token_ids
    placed = [
        PlacedKV(kv=one, position=part.segment.start) for part, one in zip(plan.stored, kv, strict=True)
    ]
    stitched = engine.stitch(placed, capacity=len(token_ids) + room)
    started = clock()
    k = budget(plan.reusable_tokens, ratio) if policy.recomputes else 0
    chosen, captured = _select(plan, engine=engine, stitched=stitched, policy=policy, k=k, signals=signals)
    selected = clock()
    load_before_fusing = stitched.seconds
    rows = torch.cat((chosen + plan.prefix, torch.arange(plan.query_start, len(token_ids))))
    logits = engine.fuse(stitched, token_ids, rows=rows)
    fused = clock()
    position = len(token_ids)

    def step(token_id: int) -> torch.Tensor:
        nonlocal position
        position += 1
        return engine.step(stitched, token_id, position=position - 1)

    return Prefilled(
        logits=logits,
        step=step,
        selected=tuple((chosen + plan.prefix).tolist()),
        stats=SelectionStats(
            policy=policy.name,
            k=k,
            reusable=plan.reusable_tokens,
            segments=_segments(chosen),
            captured_deviation=captured,
        ),
        prefix=plan.prefix,
        reused=plan.reusable_tokens - k,
        computed=len(token_ids) - plan.query_start,
        load=stitched.seconds,
        select=selected - started - load_before_fusing,
        fuse=fused - selected - (stitched.seconds - load_before_fusing),
    )


def _select(
    plan: Plan,
    *,
    engine: TransformersHost,
    stitched: StitchedKV,
    policy: Policy,
    k: int,
    signals: Signals,
) -> tuple[torch.Tensor, float | None]:
    """Indices into the reusable tokens, ascending, and their share of the deviation where it was needed."""
    import torch

    from rolling_kv.policies.base import SelectionInput, Span

    if k in (0, plan.reusable_tokens):
        return torch.arange(k), None
    score = None
    if policy.needs is not None:
        score = signals.score(policy.needs, plan, engine=engine, stitched=stitched, k=k).cpu()
    spans = [Span(s.start - plan.prefix, s.stop - plan.prefix) for s in plan.reusable]
    chosen = policy.select(SelectionInput(k=k, spans=spans, score=score))
    assert len(chosen) == k, f"{policy.name} selected {len(chosen)} tokens, not {k}"
    if score is None or policy.needs is None or policy.needs.signal != "deviation":
        return chosen, None
    total = float(score.double().sum())
    return chosen, float(score.double()[chosen].sum()) / total if total > 0 else 0.0


def _segments(ascending: torch.Tensor) -> int:
    """Contiguous runs in ascending indices."""
    if len(ascending) == 0:
        return 0
    return 1 + int((ascending.diff() > 1).sum())
