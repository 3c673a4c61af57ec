"""`AsyncRollingSession`: the same session, with `await`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, Unpack

from rolling_kv.answer import Answer, Continuation, WindowChange
from rolling_kv.hooks import Hooks
from rolling_kv.ingest import Progress
from rolling_kv.options import AskOptions, PrefillOptions
from rolling_kv.preroll import PrerollReport
from rolling_kv.provenance import Provenance
from rolling_kv.session import RollingSession
from rolling_kv.stream import AnswerStream
from rolling_kv.window import Document, Prompt

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
R = TypeVar("R")

_END = object()


class AsyncAnswerStream:
    """Iterate with `async for`; `answer` is there when it has ended."""

    def __init__(self, stream: AnswerStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[str]:
        while (piece := await asyncio.to_thread(next, self._stream, _END)) is not _END:
            assert isinstance(piece, str)
            yield piece

    @property
    def answer(self) -> Answer:
        return self._stream.answer


class AsyncRollingSession:
    """Every method is the one of `RollingSession`, run in a thread so that the event loop stays free.

    Calls on one session take turns, in the order in which they got hold of it.
    """

    def __init__(self, session: RollingSession) -> None:
        self._session = session

    @classmethod
    async def open(cls, **settings: Any) -> Self:
        """Takes the arguments of `RollingSession.open`."""
        return cls(await asyncio.to_thread(RollingSession.open, **settings))

    async def close(self) -> None:
        await _in_thread(self._session.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def documents(self) -> tuple[Document, ...]:
        """The window, oldest first."""
        return self._session.documents

    @property
    def hooks(self) -> Hooks:
        """Functions registered here are called in the threads that compute."""
        return self._session.hooks

    async def append(self, text: str, *, id: str | None = None, pinned: bool = False) -> WindowChange:
        return await _in_thread(self._session.append, text, id=id, pinned=pinned)

    async def extend(
        self,
        texts: Sequence[str],
        *,
        ids: Sequence[str] | None = None,
        pinned: bool = False,
        progress: Progress | None = None,
    ) -> list[WindowChange]:
        """`progress` is called in the thread that computes."""
        return await _in_thread(self._session.extend, texts, ids=ids, pinned=pinned, progress=progress)

    async def show(
        self, texts: Sequence[str], *, ids: Sequence[str] | None = None, progress: Progress | None = None
    ) -> WindowChange:
        """`progress` is called in the thread that computes."""
        return await _in_thread(self._session.show, texts, ids=ids, progress=progress)

    async def evict(self, document_id: str, *, forget: bool = False) -> WindowChange:
        return await _in_thread(self._session.evict, document_id, forget=forget)

    async def replace(self, document_id: str, text: str) -> WindowChange:
        return await _in_thread(self._session.replace, document_id, text)

    async def pin(self, document_id: str) -> None:
        await _in_thread(self._session.pin, document_id)

    async def unpin(self, document_id: str) -> None:
        await _in_thread(self._session.unpin, document_id)

    async def ask(self, query: str, **options: Unpack[AskOptions]) -> Answer:
        return await _in_thread(self._session.ask, query, **options)

    async def score(
        self, query: str, token_ids: Sequence[int], **options: Unpack[PrefillOptions]
    ) -> Continuation:
        return await _in_thread(self._session.score, query, token_ids, **options)

    async def next_token_logits(self, query: str, **options: Unpack[PrefillOptions]) -> torch.Tensor:
        return await _in_thread(self._session.next_token_logits, query, **options)

    async def preroll(self, *, progress: Progress | None = None) -> PrerollReport:
        """`progress` is called in the thread that computes."""
        return await _in_thread(self._session.preroll, progress=progress)

    async def provenance(self) -> list[Provenance]:
        return await _in_thread(self._session.provenance)

    async def check_integrity(self) -> list[str]:
        return await _in_thread(self._session.check_integrity)

    async def stream(self, query: str, **options: Unpack[AskOptions]) -> AsyncAnswerStream:
        """Prefills the prompt; iterate over what it returns with `async for`."""
        return AsyncAnswerStream(await _in_thread(self._session.stream, query, **options))

    async def prompt(self, query: str, *, answer_prefix: str = "") -> Prompt:
        return await _in_thread(self._session.prompt, query, answer_prefix=answer_prefix)

    async def prompt_token_ids(self, query: str, *, answer_prefix: str = "") -> tuple[int, ...]:
        return await _in_thread(self._session.prompt_token_ids, query, answer_prefix=answer_prefix)


async def _in_thread(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    return await asyncio.to_thread(call, *args, **kwargs)
