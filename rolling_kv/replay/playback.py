"""Playing a history back: one arm's sessions, from an empty store, through one order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import xxhash

from rolling_kv.answer import Answer
from rolling_kv.bench.arms import Arm
from rolling_kv.config import session_config
from rolling_kv.errors import ConfigError, TraceMismatchError
from rolling_kv.hooks import Fused, TokenChosen
from rolling_kv.policies import create_policy
from rolling_kv.replay.history import DECIDED, History, HistoryRequest, Question, Shown, content_of
from rolling_kv.replay.trace.lines import tokens_digest
from rolling_kv.session import RollingSession
from rolling_kv.store.memory import MemoryStore
from rolling_kv.window import LayoutSource, Prompt, layout_from, parse_conditioning

if TYPE_CHECKING:
    import torch

    from rolling_kv.call import FusedKV
    from rolling_kv.engine.host import TransformersHost

Protocol = Literal["populate", "plain"]


@dataclass(frozen=True, slots=True)
class Played:
    """An answer, and what was seen of it.

    Args:
        prompt: that was answered.
        kv_fingerprint: as in `ReplayRow`.
        logits: each that a token of the answer, or its end, was chosen from, [tokens, vocabulary].
        kv: that it was decoded from; None under full prefill.
    """

    answer: Answer
    prompt: Prompt
    kv_fingerprint: str
    logits: torch.Tensor
    kv: FusedKV | None


class Playback:
    """One arm's memory: a session for every layout in the history, over one store in memory, all from empty.

    Under the protocol `populate` the window before a request's is run first, as in "Request Order Matters",
    section 4.1: where KV is taken from fused prompts, by a fused call over it; otherwise its documents' KV is
    computed and stored. Such a call is left out where it could change nothing: under `first-seen`, when every
    document of that window has its KV already. Use it as a context manager.

    Raises:
        ConfigError: the arm is `session`, and no single session was recorded.
    """

    def __init__(
        self, engine: TransformersHost, history: History, arm: Arm, *, protocol: Protocol = "populate"
    ) -> None:
        self._engine = engine
        self._arm = arm
        self._populates = protocol == "populate"
        self._settings = _settings(history, arm)
        config = session_config(**self._settings)
        self._conditioning = parse_conditioning(config.conditioning)
        self._reuses = create_policy(config.policy).reuses
        self._store = MemoryStore()
        self._sessions: dict[str, RollingSession] = {}
        self._fused: dict[str, set[Shown]] = {}  # documents that a fused prompt of that session has held

    def close(self) -> None:
        """Lets go of all KV."""
        for session in self._sessions.values():
            session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def play(self, request: HistoryRequest) -> Played:
        """Answers a request after what the protocol puts before it.

        Raises:
            TraceMismatchError: its prompt is not the one that was recorded.
        """
        session = self._prepared(request)
        fused: list[Fused] = []
        logits: list[torch.Tensor] = []
        fingerprints: list[str] = []

        def see(event: Fused) -> None:
            fused.append(event)
            fingerprints.append("" if event.kv is None else kv_fingerprint(event.kv, event.call.prompt))

        with (
            session.hooks.on(Fused, see),
            session.hooks.on(TokenChosen, lambda event: logits.append(event.logits)),
        ):
            answer = session.ask(request.question.query, **self._options(request.question))
        self._note(request.layout, request.documents)
        import torch

        return Played(
            answer=answer,
            prompt=fused[0].call.prompt,
            kv_fingerprint=fingerprints[0],
            logits=torch.stack(logits),
            kv=fused[0].kv,
        )

    def score(self, request: HistoryRequest, token_ids: tuple[int, ...]) -> torch.Tensor:
        """The logits of a continuation of the prompt that was just played, by a prefill of its own."""
        session = self._session(request.layout)
        return session.score(
            request.question.query, token_ids, **self._prefill_options(request.question)
        ).logits

    def pass_by(self, request: HistoryRequest) -> None:
        """Leaves behind what playing the request leaves behind, without an answer."""
        session = self._prepared(request)
        if self._conditioning.fused != "never" and self._reuses:
            session.score(request.question.query, (), **self._prefill_options(request.question))
            self._note(request.layout, request.documents)

    def _prepared(self, request: HistoryRequest) -> RollingSession:
        session = self._session(request.layout)
        if self._populates and self._reuses and request.previous:
            self._populate(session, request)
        self._show(session, request.documents, request.layout)
        if request.prompt_digest is not None:
            prefix = request.question.options.get("answer_prefix", "")
            ids = session.prompt_token_ids(request.question.query, answer_prefix=prefix)
            if tokens_digest(ids) != request.prompt_digest:
                raise TraceMismatchError(
                    f"The prompt of request {request.number} is not the one that was recorded. Its chat "
                    "template or tokenizer has changed since; record anew."
                )
        return session

    def _populate(self, session: RollingSession, request: HistoryRequest) -> None:
        if self._conditioning.fused == "never":
            self._show(session, request.previous, request.layout)
            return
        known = self._fused.get(request.layout.key, set())
        if self._conditioning.fused == "first" and known.issuperset(request.previous):
            return
        self._show(session, request.previous, request.layout)
        question = request.previous_question or request.question
        session.score(question.query, (), **self._prefill_options(question))
        self._note(request.layout, request.previous)

    def _show(self, session: RollingSession, documents: tuple[Shown, ...], layout: LayoutSource) -> None:
        named = all(one.id is not None for one in documents)
        session.show(
            [content_of(one, layout) for one in documents],
            ids=[one.id or "" for one in documents] if named else None,
        )

    def _note(self, layout: LayoutSource, documents: tuple[Shown, ...]) -> None:
        self._fused.setdefault(layout.key, set()).update(documents)

    def _session(self, layout: LayoutSource) -> RollingSession:
        key = layout.key
        if key not in self._sessions:
            self._sessions[key] = RollingSession(
                engine=self._engine,
                store=self._store,
                config=session_config(**{**self._settings, "instruction": layout.instruction}),
                layout=layout_from(layout, self._engine.tokenizer),
            )
        return self._sessions[key]

    def _options(self, question: Question) -> Any:
        options = dict(question.options)
        return options if self._arm.policy is None else _without(options, DECIDED)

    def _prefill_options(self, question: Question) -> Any:
        options = self._options(question)
        return {name: options[name] for name in ("answer_prefix", *DECIDED) if name in options}


def kv_fingerprint(kv: FusedKV, prompt: Prompt) -> str:
    """Hashes of keys and values by layer and segment, as `kv_grid` reads them: 32 bits of xxh3 each."""
    import torch

    grid = np.empty((kv.layers, len(prompt.segments)), dtype="<u4")
    for layer in range(kv.layers):
        for column, segment in enumerate(prompt.segments):
            digest = xxhash.xxh3_64()
            for part in kv.segment(segment, layer):
                digest.update(part.contiguous().view(torch.uint8).cpu().numpy().data)
            grid[layer, column] = digest.intdigest() & 0xFFFFFFFF
    return grid.tobytes().hex()


def _settings(history: History, arm: Arm) -> dict[str, Any]:
    if arm.policy is None and history.settings is None:
        raise ConfigError(
            f"The arm 'session' takes the settings that were recorded, and {history.source} holds "
            "none, or several that differ. Replay one session's trace alone, or name a policy instead, for "
            "example document-aligned:window:3."
        )
    settings = {**(history.settings or {}), **arm.settings()}
    policy = create_policy(str(settings["policy"]))
    return {**settings, "ingest": "eager" if policy.reuses else "lazy"}


def _without(options: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}
