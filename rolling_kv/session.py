"""`RollingSession`: a rolling window of documents, and answers over it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from rolling_kv.answer import Answer, WindowChange
from rolling_kv.config import (
    DEFAULT_CONDITIONING,
    DEFAULT_POLICY,
    DEFAULT_RATIO,
    SessionConfig,
    require_ratio,
    session_config,
)
from rolling_kv.errors import ConfigError, SessionClosedError
from rolling_kv.ingest import Ingestor, IngestReport, Progress
from rolling_kv.plan import Plan, make_plan, require_positions
from rolling_kv.policies import POLICIES
from rolling_kv.store import Lineage, make_lineage, open_store
from rolling_kv.stream import AnswerStream
from rolling_kv.window import (
    Document,
    Prompt,
    PromptLayout,
    Window,
    parse_conditioning,
)

if TYPE_CHECKING:
    import torch

    from rolling_kv.call import Prefilled
    from rolling_kv.engine.decode import Guide
    from rolling_kv.engine.host import TransformersHost
    from rolling_kv.kv import SegmentKV
    from rolling_kv.policies.base import Policy
    from rolling_kv.signals import Signals
    from rolling_kv.store.base import KVStore
    from rolling_kv.window.layout import Layout, Message


class RollingSession:
    """A window of documents over one model. Open it with `RollingSession.open`; use it as a context manager.

    Calls from several threads take turns. A call that raises leaves the window as it was.

    Made directly, with an engine, a store and a `layout` of its own, it takes what that layout takes: with a
    `ConversationLayout` the window holds messages, and the query is the newest one.
    """

    def __init__(
        self,
        *,
        engine: TransformersHost,
        store: KVStore,
        config: SessionConfig,
        layout: Layout | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config
        self.engine = engine
        self._store = store
        self.clock = clock
        self._lock = RLock()
        self._closed = False
        self._unreported: list[str] = []  # what went wrong at append, for the usage of the next answer
        self._layout: Layout = layout or PromptLayout(engine.tokenizer, instruction=config.instruction)
        self._conditioning = parse_conditioning(config.conditioning)
        self._window = Window(max_documents=config.window, max_tokens=config.window_tokens)
        self._ingestor = Ingestor(engine=engine, store=store, clock=clock)
        if config.selection_layer >= engine.layers:
            raise ConfigError(
                f"selection_layer is {config.selection_layer}; the model {engine.name!r} has layers 0 to "
                f"{engine.layers - 1}. Deviations are usually taken at layer 1."
            )
        store.claim(config.namespace, engine.identity)

    @classmethod
    def open(
        cls,
        *,
        model: str | Path | TransformersHost = "demo",
        instruction: str = "",
        window: int | None = None,
        window_tokens: int | None = None,
        policy: str = DEFAULT_POLICY,
        ratio: float = DEFAULT_RATIO,
        conditioning: str = DEFAULT_CONDITIONING,
        selection_layer: int = 1,
        anchor_rule: Literal["kvzip", "knorm", "sink"] = "kvzip",
        anchor_ratio: float = 0.1,
        store: str | Path | None = None,
        namespace: str = "default",
        ingest: Literal["eager", "lazy"] = "eager",
        deterministic: bool = True,
        dtype: str = "auto",
        device: str = "auto",
        progress: Callable[[str, float], None] | None = None,
    ) -> Self:
        """Opens a session with an empty window.

        Args:
            model: a local folder, a hub id, `demo`, or an engine from `load_engine` to share.
            instruction: stands before the documents in every prompt.
            window: documents at most; the oldest is evicted on append. None: no bound.
            window_tokens: document tokens at most, as well or instead.
            policy: which stored tokens to recompute; see `rolling_kv.policies.POLICIES`.
            ratio: how many of them, 0 to 1.
            conditioning: what a document's stored KV has seen: `isolated`, `instruction` or `window:k`.
            selection_layer: the layer (0-based, at least 1) at which deviations are taken.
            anchor_rule, anchor_ratio: which tokens of each document stand for it when a policy probes the
                query over anchors (`qcfuse`), and how many of them, 0 to 1.
            store: a folder for KV, made when missing; None keeps KV in memory.
            namespace: keeps KV apart from that of other namespaces in the same store.
            ingest: `eager` computes a document's KV when it is appended, `lazy` when it is first asked about;
                answers are the same.
            deterministic: the answer must depend on the prompt alone. Every conditioning mode of this release
                keeps to that, so both values give the same answers.
            dtype, device: of the model, `auto` by default; see `load_engine`.
            progress: called with a stage and a fraction while a demo model is converted, once.

        Raises:
            ConfigError, ModelError, StoreError, TemplateError
        """
        config = session_config(
            instruction=instruction,
            window=window,
            window_tokens=window_tokens,
            policy=policy,
            ratio=ratio,
            conditioning=conditioning,
            selection_layer=selection_layer,
            anchor_rule=anchor_rule,
            anchor_ratio=anchor_ratio,
            store=store,
            namespace=namespace,
            ingest=ingest,
            deterministic=deterministic,
        )
        if isinstance(model, str | Path):
            from rolling_kv.engine import load_engine

            model = load_engine(model, dtype=dtype, device=device, progress=progress)
        opened = open_store(config.store)
        try:
            return cls(engine=model, store=opened, config=config)
        except BaseException:
            opened.close()
            raise

    def close(self) -> None:
        """Ends the session; stored KV stays. Closing twice is harmless."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def documents(self) -> tuple[Document, ...]:
        """The window, oldest first."""
        return self._window.documents

    def append(self, text: str | Message, *, id: str | None = None, pinned: bool = False) -> WindowChange:
        """Adds a document at the end of the window, and evicts the oldest that no longer fit.

        Args:
            text: its surrounding white space is not part of the prompt.
            id: names it in the window; by default made from its content.
            pinned: it is never evicted to make room.

        Raises:
            WindowError: the window cannot take it. StoreError: its KV could not be stored.
        """
        return self.extend([text], ids=None if id is None else [id], pinned=pinned)[0]

    def extend(
        self,
        texts: Sequence[str | Message],
        *,
        ids: Sequence[str] | None = None,
        pinned: bool = False,
        progress: Progress | None = None,
    ) -> list[WindowChange]:
        """Appends several documents at once, and computes KV only for the window that results.

        All are appended, or none. The tokens computed are counted in the last change.

        Args:
            progress: called with how many segments of the window are at hand, of how many.
        """
        if isinstance(texts, str):
            raise TypeError("extend() takes a list of texts; use append() for one.")
        if ids is not None and len(ids) != len(texts):
            raise ConfigError(f"{len(texts)} texts and {len(ids)} ids; expected one id a text.")
        with self._open():
            window = self._window
            added: list[tuple[Document, tuple[Document, ...]]] = []
            for index, text in enumerate(texts):
                document = self._layout.document(text, document_id="", pinned=pinned)
                name = window.unused_id(document.content_hash) if ids is None else ids[index]
                document = replace(document, id=name)
                window, evicted = window.append(document)
                added.append((document, evicted))
            report = self._adopt(window, progress=progress)
        return [
            WindowChange(
                document_id=document.id,
                evicted=tuple(one.id for one in evicted),
                computed=report.computed if index == len(added) - 1 else 0,
                degraded=tuple(report.degraded) if index == len(added) - 1 else (),
            )
            for index, (document, evicted) in enumerate(added)
        ]

    def evict(self, document_id: str) -> WindowChange:
        """Takes a document out of the window, pinned or not. Its stored KV stays in the store."""
        with self._open():
            window, document = self._window.evict(document_id)
            report = self._adopt(window)
        return WindowChange(
            document_id=document.id,
            evicted=(document.id,),
            computed=report.computed,
            degraded=tuple(report.degraded),
        )

    def replace(self, document_id: str, text: str | Message) -> WindowChange:
        """Puts `text` in the place of a document, under the same id and pinned as it was."""
        with self._open():
            old = self._window.documents[self._window.index_of(document_id)]
            document = self._layout.document(text, document_id=document_id, pinned=old.pinned)
            window, evicted = self._window.replace(document_id, document)
            report = self._adopt(window)
        return WindowChange(
            document_id=document_id,
            evicted=tuple(one.id for one in evicted),
            computed=report.computed,
            degraded=tuple(report.degraded),
        )

    def pin(self, document_id: str) -> None:
        """Keeps a document from being evicted to make room."""
        with self._open():
            self._window = self._window.pin(document_id)

    def unpin(self, document_id: str) -> None:
        """Lets a pinned document be evicted again."""
        with self._open():
            self._window = self._window.pin(document_id, pinned=False)

    def prompt(self, query: str | Message, *, answer_prefix: str = "") -> Prompt:
        """The prompt that `ask` would run, segment by segment."""
        return self._layout.prompt(self._window.documents, query, answer_prefix=answer_prefix)

    def prompt_token_ids(self, query: str | Message, *, answer_prefix: str = "") -> tuple[int, ...]:
        """The exact prompt, so that it can be checked against another engine."""
        return self.prompt(query, answer_prefix=answer_prefix).token_ids

    def next_token_logits(
        self,
        query: str | Message,
        *,
        answer_prefix: str = "",
        policy: str | None = None,
        ratio: float | None = None,
    ) -> torch.Tensor:
        """The first token's logits, [vocabulary], float32, without decoding."""
        with self._open():
            plan = self._plan(query, answer_prefix, room=1)
            prefilled, report = self._prefill(
                plan, policy=self._policy(policy), ratio=self._ratio(ratio), room=1
            )
            self._unreported += report.degraded
            return prefilled.logits

    def ask(
        self,
        query: str | Message,
        *,
        max_new_tokens: int = 64,
        answer_prefix: str = "",
        stop: Sequence[str] = (),
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
        guide: Guide | None = None,
        policy: str | None = None,
        ratio: float | None = None,
    ) -> Answer:
        """Answers a query over the window.

        Args:
            query: stands after the documents.
            max_new_tokens: the answer's tokens at most.
            answer_prefix: the answer begins with this text, which counts as prompt.
            stop: strings that end the answer and are not part of it.
            temperature, top_k, top_p, seed: sampling; greedy at temperature 0.
            guide: keeps the answer to a form; see `rolling_kv.engine.decode.Guide`.
            policy, ratio: instead of the session's, for this call; `full-prefill` gives the reference answer.

        Raises:
            PromptTooLongError: the model has fewer positions. ConfigError: an argument is not as expected.
        """
        stream = self.stream(
            query,
            max_new_tokens=max_new_tokens,
            answer_prefix=answer_prefix,
            stop=stop,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            guide=guide,
            policy=policy,
            ratio=ratio,
        )
        for _ in stream:
            pass
        return stream.answer

    def stream(
        self,
        query: str | Message,
        *,
        max_new_tokens: int = 64,
        answer_prefix: str = "",
        stop: Sequence[str] = (),
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        seed: int = 0,
        guide: Guide | None = None,
        policy: str | None = None,
        ratio: float | None = None,
    ) -> AnswerStream:
        """Like `ask`, piece by piece: iterate over the pieces of text, then read `.answer`.

        The prompt is fixed and prefilled by this call; appending while the stream is read does not change it.
        """
        from rolling_kv.engine.decode import Decoding, Sampling

        if isinstance(stop, str):
            stop = (stop,)
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        if max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {max_new_tokens}; expected at least 1.")
        with self._open():
            started = self.clock()
            chosen = self._policy(policy)
            plan = self._plan(query, answer_prefix, room=max_new_tokens)
            prefilled, report = self._prefill(
                plan, policy=chosen, ratio=self._ratio(ratio), room=max_new_tokens
            )
            report.degraded, self._unreported = self._unreported + report.degraded, []
            ready = self.clock()
        decoding = Decoding(
            prefilled.logits,
            step=prefilled.step,
            tokenizer=self.engine.tokenizer,
            sampling=sampling,
            eos_ids=self.engine.eos_ids,
            stop=stop,
            max_new_tokens=max_new_tokens,
            guide=guide,
            clock=self.clock,
        )
        return AnswerStream(
            decoding,
            plan=plan if chosen.reuses else Plan(prompt=plan.prompt, stored=()),
            prefilled=prefilled,
            report=report,
            started=started,
            ready=ready,
            clock=self.clock,
        )

    def check_integrity(self) -> list[str]:
        """What does not hold of window and store (empty when all does); reads every stored payload."""
        return self._window.check_integrity() + self._store.check_integrity()

    @contextmanager
    def _open(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise SessionClosedError(
                    "The session is closed. Open a new one; stored KV is still in its store."
                )
            yield

    def _adopt(self, window: Window, *, progress: Progress | None = None) -> IngestReport:
        """Makes `window` the session's, once its KV is stored (eager) or at once (lazy)."""
        report = IngestReport()
        if self.config.ingest == "eager":
            plan = self._planned(self._layout.prompt(window.documents, None))
            _, report = self._ingestor.ensure(plan.stored, progress=progress)
            needs = self._policy(None).needs
            if needs is not None and needs.signal == "anchors":
                self._anchors(plan, report)
            self._unreported += report.degraded
        self._window = window
        return report

    def _planned(self, prompt: Prompt) -> Plan:
        return make_plan(prompt, conditioning=self._conditioning, lineage_of=self._lineage_of)

    def _lineage_of(self, path: Sequence[Sequence[int]]) -> Lineage:
        return make_lineage(self.engine.identity, namespace=self.config.namespace, path=path)

    def _plan(self, query: str | Message, answer_prefix: str, *, room: int) -> Plan:
        prompt = self.prompt(query, answer_prefix=answer_prefix)
        require_positions(prompt, room=room, positions=self.engine.max_positions, model=self.engine.name)
        return self._planned(prompt)

    def _prefill(
        self, plan: Plan, *, policy: Policy, ratio: float, room: int
    ) -> tuple[Prefilled, IngestReport]:
        from rolling_kv.call import full_prefill, fused_prefill

        if not policy.reuses:
            prefilled = full_prefill(plan, engine=self.engine, policy=policy, clock=self.clock)
            return prefilled, IngestReport()
        kv, report = self._ingestor.ensure(plan.stored)
        signals = self._signals(plan, kv, policy=policy, report=report)
        prefilled = fused_prefill(
            plan,
            kv,
            engine=self.engine,
            policy=policy,
            ratio=ratio,
            signals=signals,
            room=room,
            clock=self.clock,
        )
        return prefilled, report

    def _signals(
        self, plan: Plan, kv: Sequence[SegmentKV], *, policy: Policy, report: IngestReport
    ) -> Signals:
        """How the score that `policy` needs is computed; says in `report` when layers had to be guessed."""
        import torch

        from rolling_kv.engine.stitch import PlacedKV
        from rolling_kv.signals import Signals

        anchors: list[PlacedKV] = []
        if policy.needs is not None and policy.needs.signal == "anchors":
            chosen = self._anchors(plan, report)
            anchors = [
                PlacedKV(kv=one, position=part.segment.start, tokens=torch.tensor(tokens))
                for part, one, tokens in zip(plan.stored, kv, chosen, strict=True)
            ]
        critical = self.engine.critical_layers
        if critical.guessed and policy.needs is not None and policy.needs.layers == "critical":
            report.degraded.append(
                f"The critical layers of {self.engine.name!r} were never measured; {policy.name} used "
                f"the layers {', '.join(map(str, critical.layers))}, {critical.source}."
            )
        return Signals(
            selection_layer=self.config.selection_layer, critical_layers=critical.layers, anchors=anchors
        )

    def _anchors(self, plan: Plan, report: IngestReport) -> list[tuple[int, ...]]:
        return self._ingestor.anchors(
            plan.stored, rule=self.config.anchor_rule, ratio=self.config.anchor_ratio, report=report
        )

    def _policy(self, name: str | None) -> Policy:
        return POLICIES.create(self.config.policy if name is None else name)

    def _ratio(self, ratio: float | None) -> float:
        return self.config.ratio if ratio is None else require_ratio(ratio)
