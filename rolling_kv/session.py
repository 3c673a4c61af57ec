"""`RollingSession`: a rolling window of documents, and answers over it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

from rolling_kv.account import Account
from rolling_kv.answer import Answer, Continuation, WindowChange
from rolling_kv.config import SessionConfig, SessionSettings, session_config
from rolling_kv.errors import ConfigError, SessionClosedError, WindowError
from rolling_kv.history import FusedHistory
from rolling_kv.ingest import Ingestor, IngestReport, Progress
from rolling_kv.options import AskOptions, PrefillOptions, prefill_settings, require_layer
from rolling_kv.plan import Plan, require_positions
from rolling_kv.planner import Planner
from rolling_kv.prefill import Prefiller
from rolling_kv.preroll import BackgroundPreroll, PrerollReport
from rolling_kv.provenance import Provenance, provenance_of
from rolling_kv.store import Lineage, open_store, token_digest
from rolling_kv.stream import AnswerStream
from rolling_kv.turns import Turns
from rolling_kv.window import (
    Document,
    Prompt,
    PromptLayout,
    Window,
    parse_conditioning,
    parse_eviction,
)

if TYPE_CHECKING:
    import torch

    from rolling_kv.engine.host import TransformersHost
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
        self._turns = Turns()
        self._closed = False
        self._unreported: list[str] = []  # what went wrong at append, for the usage of the next answer
        self._layout: Layout = layout or PromptLayout(engine.tokenizer, instruction=config.instruction)
        self._conditioning = parse_conditioning(config.conditioning)
        self._window = Window(
            max_documents=config.window,
            max_tokens=config.window_tokens,
            batch=parse_eviction(config.eviction),
        )
        self._stream: tuple[
            tuple[int, ...], ...
        ] = ()  # token ids of the newest documents, evicted ones included
        fused = self._conditioning.fused
        self._history = None if fused == "never" else FusedHistory(fused)
        self._ingestor = Ingestor(engine=engine, store=store, clock=clock)
        self._planner = Planner(
            identity=engine.identity,
            sliding_window=engine.sliding_window,
            config=config,
            ingestor=self._ingestor,
            history=self._history,
        )
        self._prefiller = Prefiller(
            engine=engine, ingestor=self._ingestor, history=self._history, config=config, clock=clock
        )
        self._background = BackgroundPreroll(self._preroll_step, wanted=self._interrupted)
        require_layer(config.selection_layer, layers=engine.layers)
        store.claim(config.namespace, engine.identity)

    @classmethod
    def open(
        cls,
        *,
        model: str | Path | TransformersHost = "demo",
        dtype: str = "auto",
        device: str = "auto",
        progress: Callable[[str, float], None] | None = None,
        **settings: Unpack[SessionSettings],
    ) -> Self:
        """Opens a session with an empty window.

        Args:
            model: a local folder, a hub id, `demo`, or an engine from `load_engine` to share.
            dtype, device: of the model, `auto` by default; see `load_engine`.
            progress: called with a stage and a fraction while a demo model is converted, once.
            settings: see `SessionSettings`.

        Raises:
            ConfigError, ModelError, StoreError, TemplateError
        """
        config = session_config(**settings)
        if isinstance(model, str | Path):
            from rolling_kv.engine import load_engine

            model = load_engine(model, dtype=dtype, device=device, progress=progress)
        opened = open_store(
            config.store, quota=config.quota, ttl=config.ttl, memory_limit=config.memory_limit
        )
        try:
            return cls(engine=model, store=opened, config=config)
        except BaseException:
            opened.close()
            raise

    def close(self) -> None:
        """Ends the session; stored KV stays. Closing twice is harmless."""
        self._background.ask_to_stop()
        with self._turns.request():
            if not self._closed:
                self._closed = True
                self._ingestor.forget()
                self._store.close()
        self._background.join()

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
            window, stream = self._window, self._stream
            added: list[tuple[Document, tuple[Document, ...]]] = []
            for index, text in enumerate(texts):
                document = self._layout.document(text, document_id="", pinned=pinned)
                name = window.unused_id(document.content_hash) if ids is None else ids[index]
                document = replace(document, id=name)
                document, stream = self._in_stream(document, stream)
                window, evicted = window.append(document)
                added.append((document, evicted))
            report = self._adopt(window, stream=stream, progress=progress)
        return [
            WindowChange(
                document_id=document.id,
                evicted=tuple(one.id for one in evicted),
                computed=report.computed if index == len(added) - 1 else 0,
                degraded=tuple(report.degraded) if index == len(added) - 1 else (),
            )
            for index, (document, evicted) in enumerate(added)
        ]

    def evict(self, document_id: str, *, forget: bool = False) -> WindowChange:
        """Takes a document out of the window, pinned or not.

        Args:
            forget: also removes its KV, and all KV that was conditioned on it, from memory and store; the
                change says how much, and under which digest `rolling-kv store verify --forgotten` proves it.
                Otherwise stored KV stays in the store.

        Raises:
            WindowError: it cannot be forgotten, because its text stands in the window a second time, or lives
                on in documents that came after it (`stream:k`).
        """
        with self._open():
            window, document = self._window.evict(document_id)
            forgotten = self._forget(document, window) if forget else 0
            report = self._adopt(window)
        return WindowChange(
            document_id=document.id,
            evicted=(document.id,),
            computed=report.computed,
            degraded=tuple(report.degraded),
            forgotten=forgotten,
            digest=token_digest(document.token_ids) if forget else "",
        )

    def replace(self, document_id: str, text: str | Message) -> WindowChange:
        """Puts `text` in the place of a document, under the same id and pinned as it was."""
        with self._open():
            old = self._window.documents[self._window.index_of(document_id)]
            document = self._layout.document(text, document_id=document_id, pinned=old.pinned)
            document, stream = self._in_stream(document, self._stream)
            window, evicted = self._window.replace(document_id, document)
            report = self._adopt(window, stream=stream)
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

    def next_token_logits(self, query: str | Message, **options: Unpack[PrefillOptions]) -> torch.Tensor:
        """The first token's logits, [vocabulary], float32, without decoding."""
        started = self.clock()
        with self._open():
            account = self._prefill(query, options, room=1, started=started)
            self._unreported += account.report.degraded
            return account.prefilled.logits

    def score(
        self, query: str | Message, token_ids: Sequence[int], **options: Unpack[PrefillOptions]
    ) -> Continuation:
        """What the model makes of a given continuation, such as a reference answer (teacher forcing).

        Args:
            token_ids: of the continuation.
        """
        import torch

        started = self.clock()
        with self._open():
            account = self._prefill(query, options, room=max(1, len(token_ids)), started=started)
            logits = account.prefilled.logits[None]
            if len(token_ids):
                logits = torch.cat((logits, account.prefilled.follow(token_ids)))
        return Continuation(
            logits=logits,
            usage=account.usage(output=len(token_ids)),
            timing=account.timing(first_token=0.0),
            trace=account.trace(),
        )

    def ask(self, query: str | Message, **options: Unpack[AskOptions]) -> Answer:
        """Answers a query over the window.

        Args:
            query: stands after the documents.
            options: see `AskOptions` and `PrefillOptions`.

        Raises:
            PromptTooLongError: the model has fewer positions. ConfigError: an option is not as expected.
        """
        return self.stream(query, **options).answer

    def stream(self, query: str | Message, **options: Unpack[AskOptions]) -> AnswerStream:
        """Like `ask`, piece by piece: iterate over the pieces of text, then read `.answer`.

        The prompt is fixed and prefilled by this call; appending while the stream is read does not change it.
        """
        from rolling_kv.engine.decode import Decoding, decoding_settings

        settings, prefill_options = decoding_settings(options)
        started = self.clock()
        with self._open():
            account = self._prefill(query, prefill_options, room=settings.max_new_tokens, started=started)
            account.report.degraded, self._unreported = self._unreported + account.report.degraded, []
        prefilled = account.prefilled
        decoding = Decoding(
            prefilled.logits,
            step=lambda token_id: prefilled.follow([token_id])[-1],
            tokenizer=self.engine.tokenizer,
            eos_ids=self.engine.eos_ids,
            settings=settings,
            clock=self.clock,
        )
        return AnswerStream(decoding, account=account, busy=self._turns.busy, answered=self._answered)

    def preroll(self, *, progress: Progress | None = None) -> PrerollReport:
        """Prefills the predicted next window exactly, and returns when that is done.

        What it predicts is today's window without what the next append evicts. A session opened with
        `preroll="auto"` or `"wait"` does this in the background after every answer.

        Raises:
            ConfigError: the session was opened with `preroll="off"`, so that no call would use it.
        """
        if self.config.preroll == "off":
            raise ConfigError(
                "The session was opened with preroll='off', so no call would use a pre-roll. Open it with "
                "preroll='wait', or with preroll='auto' and deterministic=False."
            )
        from rolling_kv.engine.host import PassInterrupted

        computed = 0
        while True:
            with self._open():  # a turn a segment, so that a request need not wait for the whole window
                chain = self._predicted_chain()
                done = self._ingestor.chained(chain)
                if progress is not None:
                    progress(done, len(chain))
                try:
                    tokens = self._ingestor.extend_chain(chain, interrupted=lambda: self._turns.wanted)
                except PassInterrupted:
                    continue
            computed += tokens
            if not tokens:
                return PrerollReport(segments=done, of=len(chain), computed=computed)

    def provenance(self) -> list[Provenance]:
        """What the KV of every segment of the window was computed from, in prompt order."""
        with self._open():
            plan = self._planner.plan(self._layout.prompt(self._window.documents, None))
            return provenance_of(
                plan,
                conditioning=self.config.conditioning,
                identity=self.engine.identity,
                namespace=self.config.namespace,
                store=self._store,
                history=self._history,
            )

    def check_integrity(self) -> list[str]:
        """What does not hold of window and store (empty when all does); reads every stored payload."""
        return self._window.check_integrity() + self._store.check_integrity()

    @contextmanager
    def _open(self) -> Iterator[None]:
        with self._turns.request():
            if self._closed:
                raise SessionClosedError(
                    "The session is closed. Open a new one; stored KV is still in its store."
                )
            yield

    def _in_stream(
        self, document: Document, stream: tuple[tuple[int, ...], ...]
    ) -> tuple[Document, tuple[tuple[int, ...], ...]]:
        """The document with what came before it, and the stream with the document, as far as it matters."""
        neighbours = self._conditioning.neighbours
        if not self._conditioning.stream or neighbours is None:
            return document, stream
        return replace(document, stream=stream), (*stream, document.token_ids)[-neighbours:]

    def _forget(self, document: Document, left: Window) -> int:
        if self._conditioning.stream:
            raise WindowError(
                f"{document.id!r} cannot be forgotten under conditioning {self.config.conditioning!r}: its "
                "text lives on in the KV of the documents after it. Use window:k, or leave out forget=True."
            )
        twin = next((one.id for one in left.documents if one.token_ids == document.token_ids), None)
        if twin is not None:
            raise WindowError(
                f"{document.id!r} cannot be forgotten while {twin!r} with the same text is in the window. "
                "Evict that one first."
            )
        self._ingestor.forget()
        forgotten = self._store.forget(self.config.namespace, token_digest(document.token_ids))
        if self._history is not None:
            forgotten += self._history.forget(token_digest(document.token_ids))
        self._window = left  # whatever comes, what is forgotten is not asked about again
        return forgotten

    def _adopt(
        self,
        window: Window,
        *,
        stream: tuple[tuple[int, ...], ...] | None = None,
        progress: Progress | None = None,
    ) -> IngestReport:
        """Makes `window` the session's, once its KV is stored (eager) or at once (lazy)."""
        report = IngestReport()
        if self.config.ingest == "eager":
            prompt = self._layout.prompt(window.documents, None)
            self._require_positions(prompt, room=1)
            report = self._prefiller.ingest(self._planner.plan(prompt), progress=progress)
            self._unreported += report.degraded
        self._window = window
        self._stream = self._stream if stream is None else stream
        return report

    def _prefill(
        self, query: str | Message, options: PrefillOptions, *, room: int, started: float
    ) -> Account:
        settings = prefill_settings(self.config, options, layers=self.engine.layers)
        prompt = self.prompt(query, answer_prefix=settings.answer_prefix)
        self._require_positions(prompt, room=room)
        reuses = settings.policy.reuses
        plan = self._planner.plan(prompt) if reuses else Plan(prompt=prompt, stored=())
        labelled = self._layout.labelled(self.documents, prompt, settings.labels)
        prefilled, report = self._prefiller.prefill(plan, settings, labelled=labelled, room=room)
        ready = self.clock()
        if self._history is not None and prefilled.segment_kv is not None:
            self._history.take(plan, self._planner.fused_keys(prompt), prefilled.segment_kv)
        return Account(
            plan=plan,
            prefilled=prefilled,
            report=report,
            started=started,
            ready=ready,
            clock=self.clock,
        )

    def _predicted_chain(self) -> list[Lineage]:
        prompt = self._layout.prompt(self._window.next_after_append(), None)
        return self._planner.chain([segment.token_ids for segment in prompt.segments])

    def _preroll_step(self) -> bool:
        """One segment of the pre-roll, given up when a request comes; False when nothing is left to do."""
        from rolling_kv.engine.host import PassInterrupted

        with self._turns.background(give_up=lambda: self._background.stopping) as taken:
            if self._closed or not taken:
                return False
            try:
                computed = self._ingestor.extend_chain(
                    self._predicted_chain(),
                    interrupted=lambda: self._interrupted() or self._background.stopping,
                )
            except PassInterrupted:
                return True
            except Exception as error:  # a thread of its own has nobody to tell but the next answer
                self._unreported.append(f"The pre-roll failed: {type(error).__name__}: {error}")
                return False
        return computed > 0

    def _interrupted(self) -> bool:
        """Whether a request waits for this session or, from another session, for the engine."""
        return self._turns.wanted or self.engine.wanted

    def _answered(self) -> None:
        if self.config.preroll != "off":
            self._background.start()

    def _require_positions(self, prompt: Prompt, *, room: int) -> None:
        require_positions(prompt, room=room, positions=self.engine.max_positions, model=self.engine.name)
