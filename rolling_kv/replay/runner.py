"""Replaying a history: every arm through every order, each from empty, against full prefill."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rolling_kv.bench.arms import Arm
from rolling_kv.bench.conditions import conditions
from rolling_kv.bench.fidelity import Reference, compare
from rolling_kv.bench.remaining import Remaining
from rolling_kv.bench.rows import Rows
from rolling_kv.errors import BenchError
from rolling_kv.replay.history import History, HistoryRequest
from rolling_kv.replay.orders import Order
from rolling_kv.replay.playback import Playback, Played, Protocol
from rolling_kv.replay.references import FULL_PREFILL, References
from rolling_kv.replay.rows import ReferenceRow, ReplayRow
from rolling_kv.replay.runs import REPEAT, RESET
from rolling_kv.replay.trace.lines import tokens_digest

if TYPE_CHECKING:
    import torch

    from rolling_kv.engine.host import TransformersHost

Progress = Callable[[int, int, str], None]
"""Called with how many answers are there, of how many, and what comes next."""
Control = Literal["repeat", "reset"]
UNGUIDED = (
    "Decoded without the guide (a grammar, for example) that it was recorded with: orders are compared by "
    "another answer than the agent got."
)


@dataclass(frozen=True, slots=True)
class ReplayRun:
    """What is replayed.

    Args:
        protocol: `populate` runs the window of the request before first, as the paper does; `plain` does not.
        controls: `repeat` goes through the chronological order once more, from empty; `reset` empties the
            store before every request (full prefill has nothing to reset, and is left out).
    """

    arms: tuple[Arm, ...]
    orders: tuple[Order, ...]
    protocol: Protocol = "populate"
    controls: tuple[Control, ...] = ()

    def passes(self, count: int) -> Iterator[tuple[Arm, Order]]:
        """Every way through `count` requests, controls last, under their own names."""
        chronological = tuple(range(count))
        for arm in self.arms:
            for order in self.orders:
                yield arm, order
        for arm in self.arms:
            for control in self.controls:
                if control == REPEAT or arm != FULL_PREFILL:
                    yield arm, Order(control, chronological)

    def requests(self, count: int) -> list[int]:
        """Which of `count` requests are replayed at all, ascending."""
        return sorted({number for _, order in self.passes(count) for number in order.requests})


@dataclass(frozen=True, slots=True)
class Replayed:
    """The rows of a replay, of the arms and orders that were asked for."""

    references: tuple[ReferenceRow, ...]
    rows: tuple[ReplayRow, ...]


def replay(
    engine: TransformersHost,
    history: History,
    run: ReplayRun,
    *,
    out: Path | None = None,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Replayed:
    """Replays a history and measures every answer against full prefill's.

    Each arm under each order begins with an empty store in memory and keeps what it stores until the order is
    through; nothing but the engine is shared. A run that was stopped goes on: answers that are in
    `out/rows.jsonl` are not given again, but the requests before the first missing one of an order are passed
    by once more, since what they leave in memory is gone.

    Args:
        out: keeps rows, and full prefill's logits; None for a folder that goes at the end. Later runs on the
            same history may add arms, orders and controls to it.

    Raises:
        TraceMismatchError: the history is of another model, or its prompts cannot be made again.
        BenchError: `out` holds another run. RollingKVError
    """
    history.require_model(engine.identity)
    settings = conditions(engine) | {
        "kind": "replay",
        "history": history.digest,
        "protocol": run.protocol,
    }
    with _folder(out) as folder, Rows(folder / "rows.jsonl", settings=settings) as rows:
        references = References(engine, history, folder=folder / "references", rows=rows)
        playing = _Playing(engine, history, run, references=references, rows=rows, clock=clock)
        playing.go(progress or (lambda done, total, what: None))
        names = {(arm.name, order.name) for arm, order in run.passes(len(history))}
        found = [ReplayRow.from_dict(row) for row in rows.rows if row["kind"] == "replay"]
        return Replayed(
            references=tuple(references.row(number) for number in run.requests(len(history))),
            rows=tuple(row for row in found if (row.arm, row.order) in names),
        )


class _Playing:
    """A run on its way."""

    def __init__(
        self,
        engine: TransformersHost,
        history: History,
        run: ReplayRun,
        *,
        references: References,
        rows: Rows,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._history = history
        self._run = run
        self._references = references
        self._rows = rows
        self._clock = clock
        self._done = {(r["arm"], r["order"], r["request"]) for r in rows.rows if r["kind"] == "replay"}

    def go(self, progress: Progress) -> None:
        missing = self._references.missing(self._run.requests(len(self._history)))
        passes = list(self._run.passes(len(self._history)))
        for arm, _ in passes:
            self._playback(arm).close()  # what is wrong with its settings is said now
        left = Remaining(self._clock)
        left.expect("full prefill", len(missing))
        for arm, order in passes:
            left.expect(arm.name, len(self._left(arm, order)))
        report = _Report(progress, left)
        with self._playback(FULL_PREFILL) as playback:
            for number in missing:
                report.next("full prefill")
                self._references.answer(number, playback)
                left.took("full prefill")
        for arm, order in passes:
            if order.name == RESET:
                self._go_reset(arm, order, left, report)
            else:
                self._go_through(arm, order, left, report)
        report.next("done")

    def _go_through(self, arm: Arm, order: Order, left: Remaining, report: _Report) -> None:
        missing = self._left(arm, order)
        if not missing:
            return
        last = max(order.requests.index(number) for number in missing)
        with self._playback(arm) as playback:
            for position, number in enumerate(order.requests[: last + 1]):
                report.next(f"{arm.name}, {order.name}")
                if number in missing:
                    self._measure(arm, order, position, playback)
                    left.took(arm.name)
                else:
                    playback.pass_by(self._history.requests[number])
                    left.begin()

    def _go_reset(self, arm: Arm, order: Order, left: Remaining, report: _Report) -> None:
        for number in self._left(arm, order):
            report.next(f"{arm.name}, {order.name}")
            with self._playback(arm) as playback:
                self._measure(arm, order, order.requests.index(number), playback)
            left.took(arm.name)

    def _measure(self, arm: Arm, order: Order, position: int, playback: Playback) -> None:
        request = self._history.requests[order.requests[position]]
        played = playback.play(request)
        reference = self._references[request.number]
        if tokens_digest(played.prompt.token_ids) != self._references.row(request.number).prompt_digest:
            raise BenchError(
                f"Request {request.number} has another prompt under {arm.name} than under full prefill. That "
                "is a fault of rolling_kv; please report it."
            )
        same, kl = compare(reference, _forced(played, reference, request, playback))
        self._rows.add(_row(arm, order, position, request, played, same=same, kl=kl).to_dict())

    def _left(self, arm: Arm, order: Order) -> list[int]:
        return [number for number in order.requests if (arm.name, order.name, number) not in self._done]

    def _playback(self, arm: Arm) -> Playback:
        return Playback(self._engine, self._history, arm, protocol=self._run.protocol)


class _Report:
    """Progress, with what is left of the time."""

    def __init__(self, progress: Progress, left: Remaining) -> None:
        self._progress = progress
        self._left = left

    def next(self, what: str) -> None:
        estimate = self._left.estimate()
        shown = what if not estimate else f"{what}; about {estimate} left"
        self._progress(self._left.done, self._left.total, shown)


def _forced(
    played: Played, reference: Reference, request: HistoryRequest, playback: Playback
) -> torch.Tensor:
    """The arm's logits along the reference answer: those it decoded with where it gave the same answer."""
    import torch

    token_ids = reference.token_ids
    if played.answer.token_ids == token_ids and len(played.logits) >= reference.compared:
        return played.logits.cpu()
    if played.kv is None:
        return playback.score(request, token_ids).cpu()
    if not token_ids:
        return played.logits[:1].cpu()
    return torch.cat((played.logits[:1], played.kv.following(token_ids))).cpu()


def _row(
    arm: Arm,
    order: Order,
    position: int,
    request: HistoryRequest,
    played: Played,
    *,
    same: Sequence[bool],
    kl: float,
) -> ReplayRow:
    answer, trace, usage = played.answer, played.answer.trace, played.answer.usage
    unguided = (UNGUIDED,) if request.guided else ()
    return ReplayRow(
        arm=arm.name,
        order=order.name,
        position=position,
        request=request.number,
        prompt_digest=tokens_digest(played.prompt.token_ids),
        token_ids=answer.token_ids,
        text=answer.text,
        margins=trace.margins,
        logits_fingerprint=trace.logits_fingerprint,
        kv_fingerprint=played.kv_fingerprint,
        lineages=trace.lineages,
        top1=sum(same) / len(same),
        kl=kl,
        segments=trace.selection.segments,
        k=trace.selection.k,
        captured_deviation=trace.selection.captured_deviation,
        prefix=usage.prefix,
        reused=usage.reused,
        recomputed=usage.recomputed,
        computed=usage.computed,
        ttft=answer.timing.ttft,
        degraded=usage.degraded + unguided,
    )


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="rolling-kv-replay-") as folder:
        yield Path(folder)
