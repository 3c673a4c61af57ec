"""Replaying a history: every arm through every order, each from empty, against full prefill."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rolling_kv.bench.arms import Arm
from rolling_kv.bench.conditions import conditions
from rolling_kv.bench.remaining import Remaining
from rolling_kv.bench.rows import Rows
from rolling_kv.replay.crew import Crew, Workers
from rolling_kv.replay.history import History
from rolling_kv.replay.orders import Order
from rolling_kv.replay.playback import Protocol
from rolling_kv.replay.player import Part, PassPart, Player, ReferencePart, Row
from rolling_kv.replay.references import FULL_PREFILL, References
from rolling_kv.replay.rows import ReferenceRow, ReplayRow
from rolling_kv.replay.runs import REPEAT

if TYPE_CHECKING:
    from rolling_kv.engine.host import TransformersHost

Progress = Callable[[int, int, str], None]
"""Called with how many answers are there, of how many, and what comes next."""
Control = Literal["repeat", "reset"]
Play = Callable[[Sequence[Part]], Iterable[tuple[Part, Row | None]]]


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
    """The rows of a replay, of the arms and orders that were asked for, as `ReplayRun.passes` has them."""

    references: tuple[ReferenceRow, ...]
    rows: tuple[ReplayRow, ...]


def replay(
    engine: TransformersHost,
    history: History,
    run: ReplayRun,
    *,
    out: Path | None = None,
    workers: Workers | None = None,
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
        workers: processes that play passes beside each other, with engines equal to `engine`; None to play
            them here, one after the other. Times to the first token are those of a machine so busy.

    Raises:
        TraceMismatchError: the history is of another model, or its prompts cannot be made again.
        BenchError: `out` holds another run, or a worker died. RollingKVError
    """
    history.require_model(engine.identity)
    settings = conditions(engine) | {
        "kind": "replay",
        "history": history.digest,
        "protocol": run.protocol,
    }
    if workers is not None:
        settings["threads"] = workers.threads
    with _folder(out) as folder, Rows(folder / "rows.jsonl", settings=settings) as rows:
        logits = folder / "references"
        player = Player(engine, history, protocol=run.protocol, folder=logits)
        passes = list(run.passes(len(history)))
        for arm, _ in passes:
            player.playback(arm).close()  # what is wrong with its settings is said now
        kept = [ReferenceRow.from_dict(row) for row in rows.rows if row["kind"] == "reference"]
        references = References(history, folder=logits, known=kept)
        playing = _Playing(run, count=len(history), references=references, rows=rows, clock=clock)
        with _players(player, workers, history, engine, run, folder=logits) as play:
            playing.go(play, progress or (lambda done, total, what: None))
        place = {(arm.name, order.name): number for number, (arm, order) in enumerate(passes)}
        found = [ReplayRow.from_dict(row) for row in rows.rows if row["kind"] == "replay"]
        asked = [row for row in found if (row.arm, row.order) in place]
        return Replayed(
            references=tuple(references.row(number) for number in run.requests(len(history))),
            rows=tuple(sorted(asked, key=lambda row: (place[row.arm, row.order], row.position))),
        )


class _Playing:
    """A run on its way: what is missing is played, and its rows are kept."""

    def __init__(
        self,
        run: ReplayRun,
        *,
        count: int,
        references: References,
        rows: Rows,
        clock: Callable[[], float],
    ) -> None:
        self._run = run
        self._count = count
        self._references = references
        self._rows = rows
        self._done = {(r["arm"], r["order"], r["request"]) for r in rows.rows if r["kind"] == "replay"}
        self._left = Remaining(clock)

    def go(self, play: Play, progress: Progress) -> None:
        missing = self._references.missing(self._run.requests(self._count))
        # those first that recompute everything: they take longest, and at the end workers would wait for them
        passes = sorted(self._missing_passes(), key=lambda one: one[0] != FULL_PREFILL)
        self._left.expect(ReferencePart.kind, len(missing))
        for arm, _, numbers in passes:
            self._left.expect(arm.name, len(numbers))
        self._left.begin()
        self._play([ReferencePart(number) for number in missing], play, progress)
        self._play(
            [
                PassPart(arm, order, numbers, tuple(self._references.row(n) for n in sorted(numbers)))
                for arm, order, numbers in passes
            ],
            play,
            progress,
        )
        self._report(progress, "done")

    def _play(self, parts: Sequence[Part], play: Play, progress: Progress) -> None:
        if parts:
            self._report(progress, parts[0].name)
        for part, row in play(parts):
            if row is None:
                self._left.begin()
                continue
            if isinstance(row, ReferenceRow):
                if self._references.keep(row):
                    self._rows.add(row.to_dict())
            else:
                self._rows.add(row.to_dict())
            self._left.took(part.kind)
            self._report(progress, part.name)

    def _missing_passes(self) -> Iterator[tuple[Arm, Order, tuple[int, ...]]]:
        for arm, order in self._run.passes(self._count):
            numbers = tuple(n for n in order.requests if (arm.name, order.name, n) not in self._done)
            if numbers:
                yield arm, order, numbers

    def _report(self, progress: Progress, what: str) -> None:
        estimate = self._left.estimate()
        shown = what if not estimate else f"{what}; about {estimate} left"
        progress(self._left.done, self._left.total, shown)


@contextmanager
def _players(
    player: Player,
    workers: Workers | None,
    history: History,
    engine: TransformersHost,
    run: ReplayRun,
    *,
    folder: Path,
) -> Iterator[Play]:
    """What plays parts: this process, or others."""
    if workers is None:
        yield lambda parts: ((part, row) for part in parts for row in player.play(part))
        return
    with Crew(workers, history, identity=engine.identity, protocol=run.protocol, folder=folder) as crew:
        yield crew.play


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="rolling-kv-replay-") as folder:
        yield Path(folder)
