"""The sessions behind a chat model: one engine, one store, a window for each namespace and instruction."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from threading import RLock
from typing import TYPE_CHECKING, Any

from langchain_rolling_kv.errors import PromptOverflowError
from langchain_rolling_kv.grammar import GrammarGuide, vocabulary_of
from langchain_rolling_kv.messages import Turn
from langchain_rolling_kv.tool_calls import tools_instruction
from rolling_kv import AnswerStream, RollingSession
from rolling_kv.config import session_config
from rolling_kv.errors import PromptTooLongError
from rolling_kv.window import ConversationLayout
from rolling_kv.window.conversation import carries_tools

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from rolling_kv.engine.host import TransformersHost
    from rolling_kv.kv import SegmentKV
    from rolling_kv.store import Lineage
    from rolling_kv.store.base import KVStore

_MOST_OPEN = 16  # sessions, each with the KV of its last prompt in memory
_PROBE = {
    "type": "function",
    "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}},
}


class ChatSessions:
    """Answers conversations. Safe to use from several threads; calls on one window take turns.

    Args:
        engine: the model.
        store: shared by all windows; a namespace keeps its KV apart.
        settings: of `RollingSession.open`: policy, ratio, conditioning and others.
    """

    def __init__(self, *, engine: TransformersHost, store: KVStore, settings: Mapping[str, Any]) -> None:
        self.engine = engine
        self._store = store
        self._settings = settings
        self._open: OrderedDict[tuple[str, str, str], _Window] = OrderedDict()
        self._lock = RLock()

    @cached_property
    def native_tools(self) -> bool:
        """Whether the model's chat template lists tools, calls and results."""
        return carries_tools(self.engine.tokenizer, [_PROBE])

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        return vocabulary_of(self.engine)

    def stream(
        self,
        turns: Sequence[Turn],
        *,
        namespace: str,
        instruction: str,
        tools: Sequence[Mapping[str, Any]],
        grammar: str | None,
        **options: Any,
    ) -> tuple[AnswerStream, dict[str, int]]:
        """Prefills the conversation and begins the answer to its last turn.

        Returns:
            The answer, and the tokens of what had no stored KV before and has it now, by store key.

        Raises:
            PromptOverflowError, RollingKVError
        """
        guide = None if grammar is None else GrammarGuide(self._vocabulary, grammar)
        window = self._window(namespace, instruction, tools)
        try:
            return window.stream(turns, guide=guide, **options)
        except PromptTooLongError as error:
            raise PromptOverflowError(str(error)) from error

    def _window(self, namespace: str, instruction: str, tools: Sequence[Mapping[str, Any]]) -> _Window:
        if tools and not self.native_tools:
            instruction = "\n\n".join(filter(None, (instruction, tools_instruction(tools))))
            tools = ()
        key = (namespace, instruction, str(tools))
        with self._lock:
            if key not in self._open:
                layout = ConversationLayout(self.engine.tokenizer, instruction=instruction, tools=tools)
                config = session_config(namespace=namespace, ingest="lazy", **self._settings)
                self._open[key] = _Window(
                    engine=self.engine, store=_CountingStore(self._store), config=config, layout=layout
                )
            self._open.move_to_end(key)
            if len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)
            return self._open[key]


class _Window:
    """One session, and the turn-taking of its calls."""

    def __init__(self, *, engine: TransformersHost, store: _CountingStore, config: Any, layout: Any) -> None:
        self._session = RollingSession(engine=engine, store=store, config=config, layout=layout)
        self._store = store
        self._lock = RLock()

    def stream(self, turns: Sequence[Turn], **options: Any) -> tuple[AnswerStream, dict[str, int]]:
        with self._lock:
            self._session.show(turns[:-1])
            self._store.written = {}
            return self._session.stream(turns[-1], **options), self._store.written


class _CountingStore:
    """A shared store that counts the tokens written through it, by key."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self.written: dict[str, int] = {}

    def put(self, lineage: Lineage, kv: SegmentKV, *args: Any, **kwargs: Any) -> None:
        self._store.put(lineage, kv, *args, **kwargs)
        self.written[lineage.key] = len(kv)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)
