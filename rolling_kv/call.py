"""One call: from a plan to the first token's logits, with its account."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from rolling_kv.answer import SelectionStats
from rolling_kv.errors import ConfigError
from rolling_kv.kv import SegmentKV
from rolling_kv.options import PrefillSettings
from rolling_kv.plan import Plan
from rolling_kv.window import Segment

if TYPE_CHECKING:
    import torch

    from rolling_kv.engine.host import TransformersHost
    from rolling_kv.engine.stitch import PlacedKV, StitchedKV
    from rolling_kv.policies.base import Policy
    from rolling_kv.signals import Signals

Clock = Callable[[], float]
OnSelected = Callable[[str, tuple[int, ...]], None]


@dataclass(frozen=True, slots=True)
class FusedKV:
    """The KV of a prompt after its fusion, which its answer is decoded from, by segment and layer.

    Args:
        tokens: of the prompt.
    """

    engine: TransformersHost
    stitched: StitchedKV
    tokens: int

    @property
    def layers(self) -> int:
        return self.engine.layers

    def segment(self, segment: Segment, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a segment at a layer, each [kv_heads, tokens, head_dim]; views.

        Keys are rotated for their positions in the prompt.
        """
        return self.engine.view(self.stitched, layer, start=segment.start, stop=segment.stop)

    def following(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits after each token of a continuation of the prompt, [tokens, vocabulary], float32.

        It uses the slots that decoding uses, so an answer that is being decoded is lost.

        Raises:
            ConfigError: it is longer than the answer may be.
        """
        room = self.stitched.capacity - self.tokens
        if len(token_ids) > room:
            raise ConfigError(
                f"The continuation has {len(token_ids)} tokens and the call has room for {room}. Ask with "
                f"max_new_tokens={len(token_ids)} or more."
            )
        return self.engine.follow(self.stitched, token_ids, position=self.tokens)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt that is ready to decode.

    Args:
        logits: after the prompt, [vocabulary], float32.
        follow: logits after each of some more tokens, [tokens, vocabulary]; call it with the tokens of the
            answer in order.
        selected: positions that were recomputed, ascending.
        stats: how they lie; it may run a pass.
        prefix, reused, computed: prompt tokens, as in `Usage`.
        segment_kv: the fused KV of a segment, copied; None under full prefill.
        fused: the same as views; None under full prefill.
        load, select, fuse: seconds, as in `Timing`.
    """

    logits: torch.Tensor
    follow: Callable[[Sequence[int]], torch.Tensor]
    selected: tuple[int, ...]
    stats: Callable[[], SelectionStats]
    prefix: int
    reused: int
    computed: int
    segment_kv: Callable[[Segment], SegmentKV] | None
    fused: FusedKV | None
    load: float
    select: float
    fuse: float


def full_prefill(plan: Plan, *, engine: TransformersHost, policy: Policy, clock: Clock) -> Prefilled:
    """Computes the whole prompt by the model's stock forward."""
    token_ids = plan.prompt.token_ids
    started = clock()
    logits, cache = engine.stock_prefill(token_ids)
    engine.synchronize()
    stats = SelectionStats(policy=policy.name, k=0, reusable=0, segments=0)
    return Prefilled(
        logits=logits,
        follow=lambda token_ids: engine.stock_follow(cache, token_ids),
        selected=(),
        stats=lambda: stats,
        prefix=0,
        reused=0,
        computed=len(token_ids),
        segment_kv=None,
        fused=None,
        load=0.0,
        select=0.0,
        fuse=clock() - started,
    )


def fused_prefill(
    plan: Plan,
    kv: Sequence[SegmentKV],
    *,
    engine: TransformersHost,
    settings: PrefillSettings,
    signals: Signals,
    labelled: frozenset[int],
    room: int,
    clock: Clock,
    on_selected: OnSelected | None = None,
) -> Prefilled:
    """Stitches the stored KV, selects, and recomputes the selection and the query.

    Args:
        kv: of `plan.stored`, in order.
        signals: computes the scores that the policy needs.
        labelled: prompt positions of the answer, when the request has labels.
        room: tokens that decoding may add.
        on_selected: called with the policy's name and the positions that will be recomputed, ascending.
    """
    import torch

    from rolling_kv.policies.base import budget

    policy = settings.policy
    token_ids = plan.prompt.token_ids
    placed = placed_segments(plan, kv)
    started = clock()
    ahead = settings.pipeline == "on" or (settings.pipeline == "auto" and engine.device.type == "cuda")
    stitched = engine.stitch(placed, capacity=len(token_ids) + room, ahead=ahead, clock=clock)
    k = budget(plan.reusable_tokens, settings.ratio) if policy.recomputes else 0
    chosen, deviation = _select(plan, stitched=stitched, policy=policy, k=k, signals=signals)
    engine.synchronize()
    selected = clock()
    load_before_fusing = stitched.seconds
    positions = torch.tensor(plan.reusable_positions, dtype=torch.int64)
    if on_selected is not None:
        on_selected(policy.name, tuple(positions[chosen].tolist()))
    rows = torch.cat((positions[chosen], torch.tensor(plan.computed_positions))).sort().values
    logits = engine.fuse(stitched, token_ids, rows=rows)
    engine.synchronize()
    fused = clock()
    position = len(token_ids)

    def follow(following: Sequence[int]) -> torch.Tensor:
        nonlocal position
        position += len(following)
        return engine.follow(stitched, following, position=position - len(following))

    def segment_kv(segment: Segment) -> SegmentKV:
        return engine.cut(stitched, segment.token_ids, start=segment.start)

    def stats() -> SelectionStats:
        every = None if settings.deviation_sample < 1.0 else deviation
        if every is None and settings.measure_deviation and plan.reusable_tokens:
            every = signals.deviations(engine.stitch(placed, capacity=len(token_ids)))
        found = labelled & set(plan.reusable_positions)
        return SelectionStats(
            policy=policy.name,
            k=k,
            reusable=plan.reusable_tokens,
            segments=_segments(positions[chosen]),
            captured_deviation=None if every is None else _share(every, chosen),
            deviation_sample=None if deviation is None else settings.deviation_sample,
            recall=len(found & set(positions[chosen].tolist())) / len(found) if found else None,
        )

    return Prefilled(
        logits=logits,
        follow=follow,
        selected=tuple(positions[chosen].tolist()),
        stats=stats,
        prefix=plan.prefix,
        reused=plan.reusable_tokens - k,
        computed=len(plan.computed_positions),
        segment_kv=segment_kv,
        fused=FusedKV(engine=engine, stitched=stitched, tokens=len(token_ids)),
        load=stitched.seconds,
        select=selected - started - load_before_fusing,
        fuse=fused - selected - (stitched.seconds - load_before_fusing),
    )


def placed_segments(plan: Plan, kv: Sequence[SegmentKV]) -> list[PlacedKV]:
    """The KV of `plan.stored` at its request positions."""
    from rolling_kv.engine.stitch import PlacedKV

    return [PlacedKV(kv=one, position=part.segment.start) for part, one in zip(plan.stored, kv, strict=True)]


def _select(
    plan: Plan, *, stitched: StitchedKV, policy: Policy, k: int, signals: Signals
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Indices into the reusable tokens, ascending, and all deviations where the policy needed them."""
    import torch

    from rolling_kv.policies.base import SelectionInput, Span

    if k in (0, plan.reusable_tokens):
        return torch.arange(k), None
    scores = {need: signals.score(need, stitched=stitched, k=k) for need in policy.needs}
    stops = list(accumulate(len(segment.token_ids) for segment in plan.reusable))
    spans = [Span(start, stop) for start, stop in pairwise([0, *stops])]
    chosen = policy.select(SelectionInput(k=k, spans=spans, scores=scores))
    assert len(chosen) == k, f"{policy.name} selected {len(chosen)} tokens, not {k}"
    deviation = next((score for need, score in scores.items() if need.signal == "deviation"), None)
    return chosen, deviation


def _share(deviation: torch.Tensor, chosen: torch.Tensor) -> float:
    """The part of the sum of d_i that lies in the chosen tokens; 0 when nothing deviates."""
    every = deviation.double().cpu()
    total = float(every.sum())
    return float(every[chosen].sum()) / total if total > 0 else 0.0


def _segments(ascending: torch.Tensor) -> int:
    """Contiguous runs in ascending indices."""
    if len(ascending) == 0:
        return 0
    return 1 + int((ascending.diff() > 1).sum())
