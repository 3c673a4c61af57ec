"""`RollingSession`: a rolling window of documents, and answers over it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

from rolling_kv import changes, hooks
from rolling_kv.account import Account
from rolling_kv.answer import Answer, Continuation, WindowChange
from rolling_kv.changes import Change
from rolling_kv.config import SessionConfig, SessionSettings, session_config
from rolling_kv.errors import ConfigError, SessionClosedError
from rolling_kv.history import FusedHistory
from rolling_kv.hooks import Call, CallKind, Hooks
from rolling_kv.ingest import Ingestor, IngestReport, Progress
from rolling_kv.options import AskOptions, PrefillOptions, prefill_settings, require_layer
from rolling_kv.plan import Plan, require_positions
from rolling_kv.planner import Planner
from rolling_kv.prefill import Prefiller
from rolling_kv.preroll import MAKE_WAY, BackgroundPreroll, PrerollReport
from rolling_kv.provenance import Provenance, provenance_of
from rolling_kv.store import Lineage, open_store, token_digest
from rolling_kv.stream import AnswerStream
from rolling_kv.turns import Turns
from rolling_kv.window import (
    Document,
    LayoutSource,
    Prompt,
    PromptLayout,
    StreamedWindow,
    Window,
    parse_conditioning,
    parse_eviction,
)

if TYPE_CHECKING:
    import torch

    from rolling_kv.engine.host import TransformersHost
    from rolling_kv.replay.trace import Recorder
    from rolling_kv.store.base import KVStore
    from rolling_kv.window.layout import Layout, Message


class RollingSession:
    """A window of documents over one model. Open it with `RollingSession.open`; use it as a context manager.

    Calls from several threads take turns. A call that raises leaves the window as it was. What a session does
    can be seen through `hooks`; see `rolling_kv.hooks`.

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
        self.hooks = Hooks()
        self._calls = count()
        self._store = store
        self.clock = clock
        self._turns = Turns()
        self._closed = False
        self._unreported: list[str] = []  # what went wrong at append, for the usage of the next answer
        self._layout: Layout = layout or PromptLayout(engine.tokenizer, instruction=config.instruction)
        bounds = Window(
            max_documents=config.window,
            max_tokens=config.window_tokens,
            batch=parse_eviction(config.eviction),
        )
        conditioning = parse_conditioning(config.conditioning)
        self._held = StreamedWindow(bounds, conditioning)
        fused = conditioning.fused
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
        hooks.opened(self)
        self._recorder = self._recording() if config.trace is not None else None

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
        with ExitStack() as ending:  # each of them ends, whatever the others raise
            ending.callback(self._background.join)
            ending.enter_context(self._turns.request())
            if not self._closed:
                self._closed = True
                self._ingestor.forget()
                if self._recorder is not None:
                    ending.callback(self._recorder.close)
                ending.callback(self._store.close)

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
        with self._open():
            change = changes.append(self._held, self._layout, texts, ids=ids, pinned=pinned)
            return self._adopt(change, progress=progress)

    def show(
        self,
        texts: Sequence[str | Message],
        *,
        ids: Sequence[str] | None = None,
        progress: Progress | None = None,
    ) -> WindowChange:
        """Has exactly these documents in the window, in this order, in one step.

        Those that are in it already, with the same text under the same id, stay as they are, pinned ones too.

        Args:
            ids: name them in the window; by default made from their content.
            progress: called with how many segments of the window are at hand, of how many.

        Returns:
            The change; its `document_id` is the last document's ("" when there is none).

        Raises:
            WindowError: the window cannot take them. StoreError: their KV could not be stored.
        """
        with self._open():
            return self._adopt(changes.show(self._held, self._layout, texts, ids=ids), progress=progress)[0]

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
            change, document = changes.evict(self._held, document_id)
            if not forget:
                return self._adopt(change)[0]
            changes.require_forgettable(document, change.held)
            forgotten, digest = 0, token_digest(document.token_ids)

            def first() -> None:
                nonlocal forgotten
                forgotten = self._forget(digest)
                self._held = change.held  # whatever comes, what is forgotten is not asked about again

            return replace(self._adopt(change, first=first)[0], forgotten=forgotten, digest=digest)

    def replace(self, document_id: str, text: str | Message) -> WindowChange:
        """Puts `text` in the place of a document, under the same id and pinned as it was."""
        with self._open():
            return self._adopt(changes.put(self._held, self._layout, document_id, text))[0]

    def pin(self, document_id: str) -> None:
        """Keeps a document from being evicted to make room."""
        with self._open():
            self._adopt(changes.pin(self._held, document_id, pinned=True))

    def unpin(self, document_id: str) -> None:
        """Lets a pinned document be evicted again."""
        with self._open():
            self._adopt(changes.pin(self._held, document_id, pinned=False))

    @property
    def layout_source(self) -> LayoutSource:
        """What, beside the model's tokenizer, decides how the window becomes a prompt."""
        return self._layout.source

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
            account = self._prefill("logits", query, options, options, room=1, started=started)
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
            room = max(1, len(token_ids))
            account = self._prefill("score", query, options, options, room=room, started=started)
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
            room = settings.max_new_tokens
            account = self._prefill("ask", query, prefill_options, options, room=room, started=started)
            account.report.degraded, self._unreported = self._unreported + account.report.degraded, []
        prefilled, call = account.prefilled, account.call

        def chosen(token_id: int, logits: torch.Tensor) -> None:
            self.hooks.fire(hooks.TokenChosen(call, token_id, logits))

        decoding = Decoding(
            prefilled.logits,
            step=lambda token_id: prefilled.follow([token_id])[-1],
            tokenizer=self.engine.tokenizer,
            eos_ids=self.engine.eos_ids,
            settings=settings,
            clock=self.clock,
            chosen=chosen if self.hooks.wanted(hooks.TokenChosen) else None,
        )
        return AnswerStream(
            decoding, account=account, busy=self._turns.busy, answered=partial(self._answered, call)
        )

    def preroll(self, *, progress: Progress | None = None) -> PrerollReport:
        """Computes ahead of the next call what the session's `preroll` says, and returns when that is done.

        What it predicts is today's window without what the next append evicts: all of it exactly (`wait`,
        `auto`), or what the conditioning computes anew for it and for the document to come (`slide`). The
        session does this in the background after every answer as well.

        Raises:
            ConfigError: the session was opened with `preroll="off"`, so that no call would use it.
        """
        if self.config.preroll == "off":
            raise ConfigError(
                "The session was opened with preroll='off', so no call would use a pre-roll. Open it with "
                "preroll='slide' or 'wait', or with preroll='auto' and deterministic=False."
            )
        from rolling_kv.engine.host import PassInterrupted

        computed = 0
        while True:
            # A turn a segment, so that a request need not wait for the whole window.
            with self._turns.background(give_up=lambda: False):
                self._require_open()
                paths = self._predicted()
                if progress is not None:
                    progress(self._ingestor.held(paths), len(paths))
                given_up, tokens = False, 0
                try:
                    tokens = self._compute_ahead(paths, interrupted=lambda: self._turns.wanted)
                except PassInterrupted:
                    given_up = True
                done = self._ingestor.held(paths)
            computed += tokens
            if given_up:
                time.sleep(MAKE_WAY)  # or this thread may take the turn again before the request does
            elif not tokens:
                return PrerollReport(segments=done, of=len(paths), computed=computed)

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
            self._require_open()
            yield

    def _require_open(self) -> None:
        if self._closed:
            raise SessionClosedError(
                "The session is closed. Open a new one; stored KV is still in its store."
            )

    def _recording(self) -> Recorder:
        from rolling_kv.replay.trace import recorder_of

        assert self.config.trace is not None
        return recorder_of(self, self.config.trace, text=self.config.trace_text)

    @property
    def _window(self) -> Window:
        return self._held.window

    def _forget(self, digest: str) -> int:
        self._ingestor.forget()
        forgotten = self._store.forget(self.config.namespace, digest)
        return forgotten + (0 if self._history is None else self._history.forget(digest))

    def _adopt(
        self,
        change: Change,
        *,
        progress: Progress | None = None,
        first: Callable[[], None] | None = None,
    ) -> list[WindowChange]:
        """Makes a window the session's once its KV is stored (eager), or at once (lazy).

        Args:
            first: done before ingestion, and for good.
        """
        before, after = self.documents, change.held.documents
        self.hooks.fire(hooks.WindowChanging(change.kind, before, after))
        if first is not None:
            first()
        told: list[WindowChange] = []
        if change.told is not None:
            report = IngestReport()
            if self.config.ingest == "eager":
                prompt = self._layout.prompt(after, None)
                self._require_positions(prompt, room=1)
                report = self._prefiller.ingest(self._planner.plan(prompt), progress=progress)
                self._unreported += report.degraded
            told = change.told(report)
        earlier, self._held = self._held, change.held
        try:
            self.hooks.fire(hooks.WindowChanged(change.kind, before, after, tuple(told)))
        except BaseException:
            self._held = earlier
            raise
        return told

    def _prefill(
        self,
        kind: CallKind,
        query: str | Message,
        options: PrefillOptions,
        given: AskOptions | PrefillOptions,
        *,
        room: int,
        started: float,
    ) -> Account:
        settings = prefill_settings(self.config, options, layers=self.engine.layers)
        prompt = self.prompt(query, answer_prefix=settings.answer_prefix)
        self._require_positions(prompt, room=room)
        reuses = settings.policy.reuses
        plan = self._planner.plan(prompt) if reuses else Plan(prompt=prompt, stored=())
        labelled = self._layout.labelled(self.documents, prompt, settings.labels)
        call = Call(next(self._calls), kind, query, given, self.documents, prompt)
        self.hooks.fire(hooks.Planned(call, plan))

        def selected(policy: str, positions: tuple[int, ...]) -> None:
            self.hooks.fire(hooks.Selected(call, plan, policy, positions))

        prefilled, report = self._prefiller.prefill(
            plan,
            settings,
            labelled=labelled,
            room=room,
            on_selected=selected if self.hooks.wanted(hooks.Selected) else None,
        )
        ready = self.clock()
        self.hooks.fire(hooks.Fused(call, plan, prefilled.logits, prefilled.fused))
        if self._history is not None and prefilled.segment_kv is not None:
            self._history.take(plan, self._planner.fused_keys(prompt), prefilled.segment_kv)
        return Account(
            call=call,
            plan=plan,
            prefilled=prefilled,
            report=report,
            started=started,
            ready=ready,
            clock=self.clock,
        )

    def _predicted(self) -> list[tuple[Lineage, ...]]:
        """What the next calls will need, as paths: the last of each, computed after the others."""
        paths: list[tuple[Lineage, ...]] = []
        if self.config.ingest == "lazy":  # what the next call over today's window needs comes first
            today = self._planner.plan(self._layout.prompt(self.documents, None))
            paths += [part.lineages for part in today.stored]
        if self.config.preroll == "slide":
            return paths + self._planner.ahead(self._layout.prompt(self._held.next_with_append(), None))
        prompt = self._layout.prompt(self._window.next_after_append(), None)
        chain = tuple(self._planner.chain([segment.token_ids for segment in prompt.segments]))
        return paths + [chain[: length + 1] for length in range(len(chain))]

    def _compute_ahead(self, paths: Sequence[Sequence[Lineage]], *, interrupted: Callable[[], bool]) -> int:
        report = IngestReport()
        try:
            return self._ingestor.compute_ahead(paths, report=report, interrupted=interrupted)
        finally:  # also of a pass that was given up
            self._unreported += report.degraded

    def _preroll_step(self) -> bool:
        """One segment of the pre-roll, given up when a request comes; False when nothing is left to do."""
        from rolling_kv.engine.host import PassInterrupted

        with self._turns.background(give_up=lambda: self._background.stopping) as taken:
            if self._closed or not taken:
                return False
            try:
                computed = self._compute_ahead(
                    self._predicted(),
                    interrupted=lambda: self._interrupted() or self._background.stopping,
                )
            except PassInterrupted:
                return True
            except Exception as error:  # a thread of its own has nobody to tell but the next answer
                self._unreported.append(f"The pre-roll failed: {type(error).__name__}: {error}")
                return False
        return computed > 0

    def _interrupted(self) -> bool:
        """Whether a request waits for this window or for the engine, or an answer is decoded."""
        return self._turns.occupied or self.engine.wanted

    def _answered(self, call: Call, answer: Answer) -> None:
        self.hooks.fire(hooks.Answered(call, answer))
        if self.config.preroll != "off":
            self._background.start()

    def _require_positions(self, prompt: Prompt, *, room: int) -> None:
        require_positions(prompt, room=room, positions=self.engine.max_positions, model=self.engine.name)
