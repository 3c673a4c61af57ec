"""How near an arm comes to full prefill on one request, over the full-prefill answer (teacher forcing)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rolling_kv.answer import Usage
from rolling_kv.options import PrefillOptions
from rolling_kv.session import RollingSession
from rolling_kv.workloads import LabelledRequest

if TYPE_CHECKING:
    import torch

STOP = ("\n",)


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to prefill; `name` is unique among arms."""

    policy: str
    ratio: float
    selection_layer: int = 1
    deviation_sample: float = 1.0

    @property
    def name(self) -> str:
        layer = "" if self.selection_layer == 1 else f"@layer{self.selection_layer}"
        sample = f"~{self.deviation_sample:g}" if self.deviation_sample < 1 else ""
        return f"{self.policy}{layer} {100 * self.ratio:g}%{sample}"


@dataclass(frozen=True)
class Reference:
    """The answer of full prefill, greedy.

    Args:
        token_ids: of the answer.
        ended: whether its end was a token of its own, which is then compared as well.
        cut: whether more was said than `token_ids`; an arm must then not carry the answer on.
        logits: [compared, vocabulary]: from which each token, and its end, were chosen.
        right: whether it is the expected answer; None when that is not known.
        ttft: seconds.
    """

    token_ids: tuple[int, ...]
    ended: bool
    logits: torch.Tensor
    text: str
    right: bool | None
    ttft: float
    prompt_tokens: int
    cut: bool = False

    @property
    def compared(self) -> int:
        """How many of the logits predict a part of the answer."""
        return len(self.token_ids) + self.ended

    @property
    def least_margin(self) -> float:
        """How far the likeliest token is from the next, in nats, where it is least."""
        two = self.log_probabilities.topk(2, dim=-1).values
        return float((two[:, 0] - two[:, 1]).min())

    def answer_only(self, request: LabelledRequest, decode: Callable[[Sequence[int]], str]) -> Reference:
        """Up to the token that makes it right: what is said behind it is no answer. Itself when wrong.

        Not before the answer has ended: `17` is none in `17.5 or 17`.
        """
        if not self.right:
            return self

        last = len(self.token_ids)
        wrong = [n for n in range(1, last + 1) if not request.is_right(decode(self.token_ids[:n]))]
        count = min(last, max(wrong, default=0) + 1)
        if count == last:
            return self
        return replace(self, token_ids=self.token_ids[:count], ended=False, cut=True)

    @cached_property  # many arms are compared with one reference, and vocabularies are large
    def log_probabilities(self) -> torch.Tensor:
        """[compared, vocabulary], float64."""
        return self.logits[: self.compared].double().log_softmax(-1)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an arm made of a request.

    Args:
        agrees: its greedy answer is full prefill's, token by token, and ends where that does.
        goes_on: it says the same tokens, and carries the answer on where full prefill's ends: 418 for 41.
        top1: the share of positions of the full-prefill answer at which both predict the same token.
        kl: mean KL(full prefill || arm) over those positions, in nats.
        recall, captured_deviation, segments, k: as in `SelectionStats`.
        select, ttft: seconds.
        computed: prompt tokens that went through the model at `ask`, and those of passes before it.
    """

    agrees: bool
    goes_on: bool
    top1: float
    kl: float
    recall: float | None
    captured_deviation: float | None
    segments: int
    k: int
    select: float
    ttft: float
    computed: int
    degraded: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def labels_of(session: RollingSession, request: LabelledRequest) -> list[tuple[str, int, int]]:
    """The request's spans as labels of the documents in the window, whose newest are the request's."""
    ids = [document.id for document in session.documents][-len(request.documents) :]
    return [(ids[span.document], span.start, span.stop) for span in request.spans]


def reference_of(session: RollingSession, request: LabelledRequest, *, max_new_tokens: int) -> Reference:
    """Answers the request by full prefill; the session's window holds its documents."""
    import torch

    seen = []

    def watch(_: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits.cpu().clone())
        return logits

    answer = session.ask(
        request.query,
        answer_prefix=request.answer_prefix,
        policy="full-prefill",
        max_new_tokens=max_new_tokens,
        stop=STOP,
        guide=watch,
    )
    return Reference(
        token_ids=answer.token_ids,
        ended=answer.finish_reason == "eos",
        logits=torch.stack(seen),
        text=answer.text,
        right=request.is_right(answer.text) if request.expected else None,
        ttft=answer.timing.ttft,
        prompt_tokens=answer.usage.prompt_tokens,
    )


def measure(
    session: RollingSession, request: LabelledRequest, reference: Reference, arm: Arm, *, stats: bool = True
) -> Outcome:
    """Runs `arm` on the request, and compares it with the reference.

    Args:
        stats: also takes the captured deviation, which costs a pass up to the selection layer.
    """
    options: PrefillOptions = {
        "answer_prefix": request.answer_prefix,
        "policy": arm.policy,
        "ratio": arm.ratio,
        "selection_layer": arm.selection_layer,
        "deviation_sample": arm.deviation_sample,
        "labels": labels_of(session, request),
        "measure_deviation": stats,
    }
    forced = session.score(request.query, reference.token_ids, **options)
    same, kl = compare(reference, forced.logits)
    goes_on = False
    if reference.cut and all(same):
        said = (*reference.token_ids, int(forced.logits[reference.compared].argmax()))
        goes_on = not request.is_right(session.engine.tokenizer.decode(said))
    selection = forced.trace.selection
    return Outcome(
        agrees=all(same) and not goes_on,
        goes_on=goes_on,
        top1=sum(same) / len(same),
        kl=kl,
        recall=selection.recall,
        captured_deviation=selection.captured_deviation,
        segments=selection.segments,
        k=selection.k,
        select=forced.timing.select,
        ttft=forced.timing.ttft,
        computed=_computed(forced.usage),
        degraded=forced.usage.degraded,
    )


def compare(reference: Reference, logits: torch.Tensor) -> tuple[Sequence[bool], float]:
    """For every compared position whether both predict the same token, and the mean KL in nats."""
    full = reference.log_probabilities
    arm = logits[: reference.compared].double().log_softmax(-1)
    same = (full.argmax(-1) == arm.argmax(-1)).tolist()
    return same, float((full.exp() * (full - arm)).sum(-1).mean())


def _computed(usage: Usage) -> int:
    return usage.recomputed + usage.computed + usage.ingested
