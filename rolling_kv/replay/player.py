"""Playing the parts of a replay, in one process: references, and what is missing of passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rolling_kv.bench.arms import Arm
from rolling_kv.bench.fidelity import Reference, compare
from rolling_kv.errors import BenchError
from rolling_kv.replay.history import History, HistoryRequest
from rolling_kv.replay.orders import Order
from rolling_kv.replay.playback import Playback, Played, Protocol
from rolling_kv.replay.references import FULL_PREFILL, References
from rolling_kv.replay.rows import ReferenceRow, ReplayRow
from rolling_kv.replay.runs import RESET
from rolling_kv.replay.trace.lines import tokens_digest

if TYPE_CHECKING:
    import torch

    from rolling_kv.engine.host import TransformersHost

UNGUIDED = (
    "Decoded without the guide (a grammar, for example) that it was recorded with: orders are compared by "
    "another answer than the agent got."
)


@dataclass(frozen=True, slots=True)
class ReferencePart:
    """Full prefill's answer to one request."""

    request: int
    name: ClassVar[str] = "full prefill"
    kind: ClassVar[str] = "full prefill"


@dataclass(frozen=True, slots=True)
class PassPart:
    """One arm's way through one order.

    Args:
        missing: the requests that are not answered yet.
        references: of these.
    """

    arm: Arm
    order: Order
    missing: tuple[int, ...]
    references: tuple[ReferenceRow, ...]

    @property
    def name(self) -> str:
        return f"{self.arm.name}, {self.order.name}"

    @property
    def kind(self) -> str:
        """Rows of one kind take about as long as each other."""
        return self.arm.name


Part = ReferencePart | PassPart
Row = ReferenceRow | ReplayRow


class Player:
    """Plays parts on one engine. A pass begins from an empty store, so parts do not touch each other.

    Args:
        folder: of the references' logits.
    """

    def __init__(
        self, engine: TransformersHost, history: History, *, protocol: Protocol, folder: Path
    ) -> None:
        self._engine = engine
        self._history = history
        self._protocol: Protocol = protocol
        self._folder = folder

    def play(self, part: Part) -> Iterator[Row | None]:
        """The rows of a part as they are measured; None for a request that was only passed by."""
        if isinstance(part, ReferencePart):
            with self.playback(FULL_PREFILL) as playback:
                yield self._references(()).answer(part.request, playback)
            return
        arm, order = part.arm, part.order
        references = self._references(part.references)
        if order.name == RESET:
            for number in part.missing:
                with self.playback(arm) as playback:
                    position = order.requests.index(number)
                    yield self._measured(arm, order, position, playback, references)
            return
        last = max(order.requests.index(number) for number in part.missing)
        with self.playback(arm) as playback:
            for position, number in enumerate(order.requests[: last + 1]):
                if number in part.missing:
                    yield self._measured(arm, order, position, playback, references)
                else:
                    playback.pass_by(self._history.requests[number])
                    yield None

    def playback(self, arm: Arm) -> Playback:
        """An arm's sessions over an empty store."""
        return Playback(self._engine, self._history, arm, protocol=self._protocol)

    def _references(self, known: Sequence[ReferenceRow]) -> References:
        return References(self._history, folder=self._folder, known=known)

    def _measured(
        self, arm: Arm, order: Order, position: int, playback: Playback, references: References
    ) -> ReplayRow:
        request = self._history.requests[order.requests[position]]
        played = playback.play(request)
        reference = references[request.number]
        if tokens_digest(played.prompt.token_ids) != references.row(request.number).prompt_digest:
            raise BenchError(
                f"Request {request.number} has another prompt under {arm.name} than under full prefill. That "
                "is a fault of rolling_kv; please report it."
            )
        same, kl = compare(reference, _forced(played, reference, request, playback))
        return _row(arm, order, position, request, played, same=same, kl=kl)


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
