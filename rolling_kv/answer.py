"""What a session gives back: answers, with an exact account of every prompt token."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

FinishReason = Literal["eos", "stop", "length"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens. `prefix + reused + recomputed + computed == prompt_tokens`, always.

    Args:
        prompt_tokens: all of them.
        prefix: at the beginning of the prompt, whose stored KV is exactly what full prefill gives.
        reused: stored KV, kept (moved to its position; fresh up to the selection layer where deviations ran).
        recomputed: stored KV, selected and recomputed: exactly k.
        computed: without stored KV: the query; under full prefill everything.
        output: tokens of the answer.
        ingested: tokens of passes that had to be run in this call before stored KV could be used (0 when the
            documents were ingested as they were appended). Not part of the partition.
        degraded: what could not be done as asked since the last answer, and why; empty when all went well.
    """

    prompt_tokens: int
    prefix: int
    reused: int
    recomputed: int
    computed: int
    output: int
    ingested: int = 0
    degraded: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        parts = self.prefix + self.reused + self.recomputed + self.computed
        assert parts == self.prompt_tokens, f"usage adds up to {parts}, not {self.prompt_tokens}"


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. `ttft` is from the call to the first token's logits; `total`, to the end of the answer.

    Args:
        ingest: computing and loading stored KV that was not at hand, such as documents under lazy ingestion.
        load: stitching stored KV at its positions.
        select: deviations and the choice of tokens.
        fuse: recomputing the chosen tokens and the query.
        first_token: choosing the first token from its logits.
    """

    ingest: float
    load: float
    select: float
    fuse: float
    first_token: float
    ttft: float
    total: float


@dataclass(frozen=True, slots=True)
class SelectionStats:
    """How the recomputed tokens lie.

    Args:
        policy: its name.
        k: how many, of `reusable` tokens.
        segments: contiguous runs.
        captured_deviation: their share of the sum of d_i; None when deviations were not taken, because the
            policy does not need those of all tokens and `measure_deviation` was not asked for.
        deviation_sample: the share of each document's tokens whose deviation was computed for the policy;
            None when it needed none.
        recall: the share of labelled tokens behind the exact prefix that is among them; None without such.
    """

    policy: str
    k: int
    reusable: int
    segments: int
    captured_deviation: float | None = None
    deviation_sample: float | None = None
    recall: float | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """What an answer was made of.

    Args:
        lineages: the store key of every stored segment in the prompt, in order; empty under full prefill.
        selection: positions that were recomputed, ascending, and how they lie.
        prerolled: tokens of the exact prefix that the conditioning alone would not have made exact: those of
            a pre-roll, and what the call or its append computed to go on from it.
        logits_fingerprint: xxh3-128 (hex) of the first token's logits as float32 bytes: equal for equal bits.
        margins: between the two likeliest tokens where each token of the answer was chosen, and its end where
            that was a token of its own: differences of logits as the model gave them, without a guide.
    """

    lineages: tuple[str, ...]
    selected: tuple[int, ...]
    selection: SelectionStats
    logits_fingerprint: str
    prerolled: int = 0
    margins: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one `ask`."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    trace: Trace

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Continuation:
    """What the model makes of a given continuation of a prompt.

    Args:
        logits: [tokens + 1, vocabulary], float32: after the prompt, and after each token of the continuation.
    """

    logits: torch.Tensor
    usage: Usage
    timing: Timing
    trace: Trace


@dataclass(frozen=True, slots=True)
class WindowChange:
    """What a change of the window did.

    Args:
        document_id: the document that was appended, replaced or evicted.
        evicted: ids of the documents that had to go, oldest first.
        computed: tokens that were computed for it: the document's, its conditioning's, and those of documents
            whose conditioning changed. 0 under lazy ingestion.
        degraded: what could not be done as asked, and why.
        forgotten: segments whose KV was removed, with `forget=True`.
        digest: of the forgotten document's token ids.
    """

    document_id: str
    evicted: tuple[str, ...]
    computed: int
    degraded: tuple[str, ...] = ()
    forgotten: int = 0
    digest: str = ""
