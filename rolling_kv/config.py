"""Session settings, validated."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from rolling_kv.errors import ConfigError, InvalidRatioError
from rolling_kv.policies import create_policy
from rolling_kv.window import parse_conditioning, parse_eviction

if TYPE_CHECKING:
    from rolling_kv.policies.base import Policy

DEFAULT_POLICY = "direct-reuse"
DEFAULT_RATIO = 0.1  # of the policies that recompute
DEFAULT_CONDITIONING = "window:8"
DEFAULT_FRESH_TAIL = 1  # where documents are computed after their neighbours
DEFAULT_NAMESPACE = "default"


Pipeline = Literal["auto", "on", "off"]
Preroll = Literal["off", "slide", "wait", "auto"]


def require_sample(share: float) -> float:
    """`share` when it is a number above 0, to 1.

    Raises:
        ConfigError
    """
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 < share <= 1.0:
        raise ConfigError(
            f"deviation_sample is {share!r}; expected a number above 0, to 1 (all tokens), for example 0.25."
        )
    return float(share)


def require_ratio(ratio: float) -> float:
    """`ratio` when it is a number from 0 to 1.

    Raises:
        InvalidRatioError
    """
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0.0 <= ratio <= 1.0:
        raise InvalidRatioError(
            f"ratio is {ratio!r}; expected a number from 0 (reuse everything) to 1 (recompute everything), "
            "for example 0.1."
        )
    return float(ratio)


def require_use_of_ratio(policy: Policy, ratio: float) -> float:
    """`ratio` when it is a number from 0 to 1 that `policy` can heed.

    Raises:
        InvalidRatioError: it is no such number. ConfigError: tokens are to be recomputed, and the policy
            chooses none.
    """
    if require_ratio(ratio) > 0.0 and not policy.recomputes:
        raise ConfigError(
            f"ratio is {ratio:g}, and policy {policy.name!r} chooses no tokens to recompute; pass one that "
            "does, such as policy='document-aligned', or leave ratio out."
        )
    return float(ratio)


class SessionSettings(TypedDict, total=False):
    """How a session keeps its window and answers.

    Keys:
        instruction: stands before the documents in every prompt.
        window: documents at most; the oldest is evicted on append. None: no bound.
        window_tokens: document tokens at most, as well or instead.
        eviction: `oldest`, one at a time, or `batch:b`: the window grows by b - 1 documents and then loses b.
            With conditioning `full` that is the exact alternative to reuse.
        policy: which stored tokens to recompute: by default none, `direct-reuse`; see
            `rolling_kv.policies.POLICIES`.
        ratio: how many of them, 0 to 1, under a policy that recomputes; None: 0.1.
        conditioning: what a document's stored KV has seen: `isolated`, `instruction`, `window:k` or `full`;
            without the deterministic contract also `stream:k`, `first-seen` or `write-back`.
        positions: where a model has sliding-window layers, `true` computes documents that lie further in than
            the window a window away from the instruction, as these layers see them; `packed` always right
            behind it.
        fresh_tail: so many of the newest documents are computed in every call, and have no stored KV. None: 1
            under `window:k` and `stream:k`, unless `preroll` makes all documents exact, otherwise 0.
        preroll: what is computed while nobody asks. `slide`: what losing the oldest document and gaining one
            takes under the conditioning; answers are the same. `wait`: the whole next window, exactly; a call
            computes what is missing, so that every answer is full prefill's. `auto`: the same, and a call
            uses what is there. Default: `off`.
        selection_layer: the layer (0-based, at least 1) at which deviations are taken.
        deviation_sample: the share of each document's tokens whose deviation is computed, above 0 to 1; the
            others are taken to deviate like the nearest of these. 1, all, is the default.
        pipeline: `on`: a layer's stored KV is loaded and moved while the layer before it is computed; `auto`:
            on a GPU only. Answers are the same.
        anchor_rule, anchor_ratio: which tokens of each document stand for it when a policy probes the query
            over anchors (`qcfuse`), and how many of them, 0 to 1.
        store: a folder for KV, made when missing; None keeps KV in memory.
        namespace: keeps KV apart from that of other namespaces in the same store.
        quota, ttl: bytes that a store folder keeps at most, and seconds after which unused KV goes.
        memory_limit: bytes of KV kept in memory without a folder; 4 GiB by default.
        ingest: `eager` computes a document's KV when it is appended, `lazy` when it is first asked about;
            answers are the same.
        trace: a file that the session's history is recorded to, for `rolling-kv replay`; see
            `rolling_kv.replay.trace`. A file of an earlier session is continued.
        trace_text: records texts, token ids and ids of documents. Without, a trace holds their hashes: it
            shows whether prompts and answers were the same, and cannot be replayed.
        deterministic: answers depend on the prompt alone, which is the default. Settings that break that are
            refused.
    """

    instruction: str
    window: int | None
    window_tokens: int | None
    eviction: str
    policy: str
    ratio: float | None
    conditioning: str
    positions: Literal["true", "packed"]
    fresh_tail: int | None
    preroll: Preroll
    selection_layer: int
    deviation_sample: float
    pipeline: Pipeline
    anchor_rule: Literal["kvzip", "knorm", "sink"]
    anchor_ratio: float
    store: str | Path | None
    namespace: str
    quota: int | None
    ttl: float | None
    memory_limit: int | None
    ingest: Literal["eager", "lazy"]
    trace: str | Path | None
    trace_text: bool
    deterministic: bool


class SessionConfig(BaseModel):
    """`SessionSettings`, validated, with their defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    instruction: str = ""
    window: int | None = None
    window_tokens: int | None = None
    eviction: str = "oldest"
    policy: str = DEFAULT_POLICY
    ratio: float | None = None
    conditioning: str = DEFAULT_CONDITIONING
    positions: Literal["true", "packed"] = "true"
    fresh_tail: int = DEFAULT_FRESH_TAIL
    preroll: Preroll = "off"
    selection_layer: int = 1
    deviation_sample: float = 1.0
    pipeline: Pipeline = "auto"
    anchor_rule: Literal["kvzip", "knorm", "sink"] = "kvzip"
    anchor_ratio: float = 0.1
    store: str | Path | None = None
    namespace: str = DEFAULT_NAMESPACE
    quota: int | None = None
    ttl: float | None = None
    memory_limit: int | None = None
    ingest: Literal["eager", "lazy"] = "eager"
    trace: str | Path | None = None
    trace_text: bool = True
    deterministic: bool = True

    @model_validator(mode="before")
    @classmethod
    def _fresh_tail(cls, given: dict[str, Any]) -> dict[str, Any]:
        if given.get("fresh_tail") is not None:
            return given
        neighbours = str(given.get("conditioning", DEFAULT_CONDITIONING)).startswith(("window:", "stream:"))
        exact = given.get("preroll") in ("wait", "auto")
        return given | {"fresh_tail": DEFAULT_FRESH_TAIL if neighbours and not exact else 0}

    @field_validator("ratio", mode="before")
    @classmethod
    def _ratio(cls, value: float | None) -> float | None:
        return None if value is None else require_ratio(value)

    @field_validator("anchor_ratio", mode="before")
    @classmethod
    def _anchor_ratio(cls, value: float) -> float:
        return require_ratio(value)

    @field_validator("deviation_sample", mode="before")
    @classmethod
    def _sample(cls, value: float) -> float:
        return require_sample(value)

    @field_validator("policy")
    @classmethod
    def _policy(cls, value: str) -> str:
        create_policy(value)
        return value

    @field_validator("conditioning")
    @classmethod
    def _conditioning(cls, value: str) -> str:
        return parse_conditioning(value).name

    @field_validator("eviction")
    @classmethod
    def _eviction(cls, value: str) -> str:
        parse_eviction(value)
        return value

    @field_validator("fresh_tail")
    @classmethod
    def _not_negative(cls, value: int) -> int:
        if value < 0:
            raise ValueError("expected 0 or more")
        return value

    @model_validator(mode="after")
    def _keeps_the_contract(self) -> SessionConfig:
        if not self.deterministic:
            return self
        if not parse_conditioning(self.conditioning).deterministic:
            raise ValueError(
                f"conditioning {self.conditioning!r} makes answers depend on what came before; pass "
                "deterministic=False, or isolated, instruction, window:k or full"
            )
        if self.preroll == "auto":
            raise ValueError(
                "preroll 'auto' makes answers depend on how far it came; pass preroll='slide' or 'wait', "
                "or deterministic=False"
            )
        return self

    @model_validator(mode="after")
    def _makes_use_of_the_ratio(self) -> SessionConfig:
        if self.ratio is not None:
            require_use_of_ratio(create_policy(self.policy), self.ratio)
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> SessionConfig:
        conditioning = parse_conditioning(self.conditioning)
        if self.preroll != "off" and conditioning.fused != "never":
            raise ValueError(
                f"preroll {self.preroll!r} and conditioning {self.conditioning!r} exclude each other"
            )
        if self.preroll in ("wait", "auto") and self.fresh_tail:
            raise ValueError(
                f"preroll {self.preroll!r} computes every document exactly, so fresh_tail has no place "
                "beside it"
            )
        return self

    @field_validator("window", "window_tokens", "selection_layer")
    @classmethod
    def _positive(cls, value: int | None) -> int | None:
        if value is not None and value < 1:
            raise ValueError("expected at least 1")
        return value

    @field_validator("namespace")
    @classmethod
    def _not_empty(cls, value: str) -> str:
        if not value:
            raise ValueError("expected a name")
        if any("\ud800" <= character <= "\udfff" for character in value):
            raise ValueError("expected characters, and it holds a lone surrogate")
        return value


def session_config(**settings: object) -> SessionConfig:
    """Validates `settings`.

    Raises:
        ConfigError: names each setting that is not as expected.
    """
    try:
        return SessionConfig.model_validate(settings)
    except ValidationError as error:
        problems = "; ".join(_described(problem) for problem in error.errors())
        raise ConfigError(f"These settings are not as expected: {problems}.") from error


def _described(problem: Any) -> str:
    """What is wrong with one setting, or with several together."""
    place = ".".join(str(part) for part in problem["loc"])
    message = str(problem["msg"]).removeprefix("Value error, ")
    return f"{place} = {problem.get('input')!r}: {message}" if place else message
