"""`RollingSession`: a rolling window of documents, and answers over it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, Unpack

from rolling_kv.account import Account
from rolling_kv.answer import Answer, Continuation, WindowChange
from rolling_kv.config import (
    DEFAULT_CONDITIONING,
    DEFAULT_POLICY,
    DEFAULT_RATIO,
    SessionConfig,
    session_config,
)
from rolling_kv.errors import ConfigError, SessionClosedError
from rolling_kv.ingest import IngestReport, Progress
from rolling_kv.options import AskOptions, PrefillOptions, prefill_settings, require_layer
from rolling_kv.plan import Plan, make_plan, require_positions
from rolling_kv.prefill import Prefiller
from rolling_kv.store import Lineage, make_lineage, open_store
from rolling_kv.stream import AnswerStream
from rolling_kv.window import (
    Document,
    Prompt,
    PromptLayout,
    Window,
    content_hash,
    parse_conditioning,
    require_text,
)

if TYPE_CHECKING:
    import torch

    from rolling_kv.engine.host import TransformersHost
    from rolling_kv.store.base import KVStore


class RollingSession:
    """A window of documents over one model. Open it with `RollingSession.open`; use it as a context manager.

    Calls from several threads take turns. A call that raises leaves the window as it was.
    """

    def __init__(
        self,
        *,
        engine: TransformersHost,
        store: KVStore,
        config: SessionConfig,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config
        self.engine = engine
        self._store = store
        self.clock = clock
        self._lock = RLock()
        self._closed = False
        self._unreported: list[str] = []  # what went wrong at append, for the usage of the next answer
        self._layout = PromptLayout(engine.tokenizer, instruction=config.instruction)
        self._conditioning = parse_conditioning(config.conditioning)
        self._window = Window(max_documents=config.window, max_tokens=config.window_tokens)
        self._prefiller = Prefiller(engine=engine, store=store, config=config, clock=clock)
        require_layer(config.selection_layer, layers=engine.layers)
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

    def append(self, text: str, *, id: str | None = None, pinned: bool = False) -> WindowChange:
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
        texts: Sequence[str],
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
                require_text(text)
                name = window.unused_id(content_hash(text)) if ids is None else ids[index]
                document = self._layout.document(text, document_id=name, pinned=pinned)
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

    def replace(self, document_id: str, text: str) -> WindowChange:
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

    def prompt(self, query: str, *, answer_prefix: str = "") -> Prompt:
        """The prompt that `ask` would run, segment by segment."""
        return self._layout.prompt(self._window.documents, query, answer_prefix=answer_prefix)

    def prompt_token_ids(self, query: str, *, answer_prefix: str = "") -> tuple[int, ...]:
        """The exact prompt, so that it can be checked against another engine."""
        return self.prompt(query, answer_prefix=answer_prefix).token_ids

    def next_token_logits(self, query: str, **options: Unpack[PrefillOptions]) -> torch.Tensor:
        """The first token's logits, [vocabulary], float32, without decoding."""
        with self._open():
            account = self._prefill(query, options, room=1)
            self._unreported += account.report.degraded
            return account.prefilled.logits

    def score(self, query: str, token_ids: Sequence[int], **options: Unpack[PrefillOptions]) -> Continuation:
        """What the model makes of a given continuation, such as a reference answer (teacher forcing).

        Args:
            token_ids: of the continuation.
        """
        import torch

        with self._open():
            account = self._prefill(query, options, room=max(1, len(token_ids)))
            logits = account.prefilled.logits[None]
            if len(token_ids):
                logits = torch.cat((logits, account.prefilled.follow(token_ids)))
        return Continuation(
            logits=logits,
            usage=account.usage(output=len(token_ids)),
            timing=account.timing(first_token=0.0),
            trace=account.trace(),
        )

    def ask(self, query: str, **options: Unpack[AskOptions]) -> Answer:
        """Answers a query over the window.

        Args:
            query: stands after the documents.
            options: see `AskOptions` and `PrefillOptions`.

        Raises:
            PromptTooLongError: the model has fewer positions. ConfigError: an option is not as expected.
        """
        return self.stream(query, **options).answer

    def stream(self, query: str, **options: Unpack[AskOptions]) -> AnswerStream:
        """Like `ask`, piece by piece: iterate over the pieces of text, then read `.answer`.

        The prompt is fixed and prefilled by this call; appending while the stream is read does not change it.
        """
        from rolling_kv.engine.decode import Decoding, decoding_settings

        settings, prefill_options = decoding_settings(options)
        with self._open():
            account = self._prefill(query, prefill_options, room=settings.max_new_tokens)
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
        return AnswerStream(decoding, account=account)

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
            prompt = self._layout.prompt(window.documents, None)
            self._require_positions(prompt, room=1)
            report = self._prefiller.ingest(self._planned(prompt), progress=progress)
            self._unreported += report.degraded
        self._window = window
        return report

    def _prefill(self, query: str, options: PrefillOptions, *, room: int) -> Account:
        started = self.clock()
        settings = prefill_settings(self.config, options, layers=self.engine.layers)
        prompt = self.prompt(query, answer_prefix=settings.answer_prefix)
        self._require_positions(prompt, room=room)
        plan = self._planned(prompt) if settings.policy.reuses else Plan(prompt=prompt, stored=())
        labelled = self._layout.labelled(self.documents, prompt, settings.labels)
        prefilled, report = self._prefiller.prefill(plan, settings, labelled=labelled, room=room)
        return Account(
            plan=plan,
            prefilled=prefilled,
            report=report,
            started=started,
            ready=self.clock(),
            clock=self.clock,
        )

    def _planned(self, prompt: Prompt) -> Plan:
        return make_plan(prompt, conditioning=self._conditioning, lineage_of=self._lineage_of)

    def _lineage_of(self, path: Sequence[Sequence[int]]) -> Lineage:
        return make_lineage(self.engine.identity, namespace=self.config.namespace, path=path)

    def _require_positions(self, prompt: Prompt, *, room: int) -> None:
        require_positions(prompt, room=room, positions=self.engine.max_positions, model=self.engine.name)
