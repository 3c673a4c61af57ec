"""Hooks: functions of the user's own that see what a session does.

| event            | when                                                                                |
|------------------|-------------------------------------------------------------------------------------|
| `WindowChanging` | before a change of the window, and before any KV is computed for it                 |
| `WindowChanged`  | the window has changed, and its KV is at hand (eager ingestion)                      |
| `Planned`        | a call's prompt is laid out and planned; nothing has been computed                   |
| `Selected`       | the tokens to recompute are chosen; not under full prefill                           |
| `Fused`          | the prompt is prefilled, and nothing has been decoded                                |
| `TokenChosen`    | a token of the answer, or its end, is chosen                                         |
| `Answered`       | the answer is there, and nobody has seen it                                          |

    with session.hooks.on(Answered, lambda event: print(event.answer.usage)):
        session.ask("What changed?")

Functions are called in the order in which they were registered, in the thread of the call. What one raises
ends the call, and the window stays, or is again, what it was. They look and do not touch: what an event holds
is not theirs to write into, and the window not theirs to change. Time they take before the first token's
logits are there (`Planned`, `Selected`) counts in `ttft`; that of `Fused` does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from rolling_kv.answer import Answer, WindowChange
from rolling_kv.errors import ConfigError
from rolling_kv.window import Document, Prompt

if TYPE_CHECKING:
    import torch

    from rolling_kv.call import FusedKV
    from rolling_kv.plan import Plan
    from rolling_kv.session import RollingSession
    from rolling_kv.window.layout import Message

ChangeKind = Literal["append", "evict", "replace", "pin", "unpin", "show"]
CallKind = Literal["ask", "score", "logits"]


@dataclass(frozen=True, slots=True)
class Call:
    """One request to a session; its events share it.

    Args:
        number: of the session's calls, from 0.
        kind: `ask` (and `stream`), `score`, or the `logits` of the next token.
        options: as they were given.
        documents: the window that the prompt was laid out over.
    """

    number: int
    kind: CallKind
    query: str | Message
    options: Mapping[str, Any]
    documents: tuple[Document, ...]
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class WindowChanging:
    """The window is about to become `after`; `extend` is an `append` of several documents."""

    kind: ChangeKind
    before: tuple[Document, ...]
    after: tuple[Document, ...]


@dataclass(frozen=True, slots=True)
class WindowChanged:
    """The window was `before` and is `after`; `changes` is what the caller will be told."""

    kind: ChangeKind
    before: tuple[Document, ...]
    after: tuple[Document, ...]
    changes: tuple[WindowChange, ...]


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of a call: its stored segments with their lineages."""

    call: Call
    plan: Plan


@dataclass(frozen=True, slots=True)
class Selected:
    """The positions that will be recomputed, ascending, by the policy of that name."""

    call: Call
    plan: Plan
    policy: str
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fused:
    """A prompt that is prefilled.

    Args:
        logits: after the prompt, [vocabulary], float32.
        kv: what the answer is decoded from; None under full prefill.
    """

    call: Call
    plan: Plan
    logits: torch.Tensor
    kv: FusedKV | None


@dataclass(frozen=True, slots=True)
class TokenChosen:
    """The next token of the answer, chosen from `logits` [vocabulary], float32, as the model gave them."""

    call: Call
    token_id: int
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to an `ask` or a `stream`."""

    call: Call
    answer: Answer


EVENTS = (WindowChanging, WindowChanged, Planned, Selected, Fused, TokenChosen, Answered)

E = TypeVar("E", WindowChanging, WindowChanged, Planned, Selected, Fused, TokenChosen, Answered)


class Registration:
    """A function that is called until it is removed, or until the end of a `with` over this."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self._remove = remove

    def remove(self) -> None:
        """The function is no longer called. Removing it twice is harmless."""
        self._remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


class Hooks:
    """The functions that were registered with one session."""

    def __init__(self) -> None:
        self._calls: dict[type, tuple[Callable[[Any], None], ...]] = {}
        self._lock = Lock()

    def on(self, event: type[E], call: Callable[[E], None]) -> Registration:
        """Calls `call` with every event of that type, until it is removed.

        Raises:
            ConfigError: there is no such event.
        """
        if event not in EVENTS:
            known = ", ".join(one.__name__ for one in EVENTS)
            raise ConfigError(
                f"{event!r} is no event of a session. Known ones, in rolling_kv.hooks: {known}."
            )
        entry = _Entry(call)

        def remove() -> None:
            with self._lock:
                self._calls[event] = tuple(one for one in self._calls[event] if one is not entry)

        with self._lock:
            self._calls[event] = (*self._calls.get(event, ()), entry)
        return Registration(remove)

    def wanted(self, event: type) -> bool:
        """Whether somebody would see an event of that type; if not, it need not be made."""
        return bool(self._calls.get(event))

    def fire(self, event: object) -> None:
        """Shows `event` to those who registered for it."""
        for call in self._calls.get(type(event), ()):
            call(event)


class _Entry:
    """One registration of a function, which may be registered twice."""

    def __init__(self, call: Callable[[Any], None]) -> None:
        self._call = call

    def __call__(self, event: object) -> None:
        self._call(event)


_observers: tuple[Callable[[RollingSession], None], ...] = ()
_observing = Lock()


@contextmanager
def observe_sessions(callback: Callable[[RollingSession], None]) -> Iterator[None]:
    """Calls `callback` with every session of this process that is opened meanwhile, by whatever opens it.

    It is called in the thread that opens the session, before that thread gets hold of it; what it raises
    keeps the session from being opened.
    """
    global _observers

    def observer(session: RollingSession) -> None:
        callback(session)

    with _observing:
        _observers = (*_observers, observer)
    try:
        yield
    finally:
        with _observing:
            _observers = tuple(one for one in _observers if one is not observer)


def opened(session: RollingSession) -> None:
    """Shows a session to those who observe."""
    for observer in _observers:
        observer(session)
