"""`RollingKVMiddleware`: an agent whose tool results and retrieved documents roll through a window."""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal, NotRequired

from langchain.agents.middleware.types import (
    AgentMiddleware,
    AgentState,
    ModelCallResult,
    ModelRequest,
    ModelResponse,
    PrivateStateAttr,
    TracePolicy,
    omit_payload,
)
from langchain_core.messages import AIMessage, AnyMessage
from langgraph.runtime import Runtime

from langchain_rolling_kv.chat_models import ChatRollingKV
from langchain_rolling_kv.window import documents_of, reference, referring
from rolling_kv.errors import ConfigError


class RollingKVState(AgentState[Any]):
    """What an agent's state has besides its messages: the window, as content hashes, oldest first."""

    rolling_kv_window: NotRequired[Annotated[list[str], PrivateStateAttr]]


class RollingKVMiddleware(AgentMiddleware[RollingKVState, Any, Any]):
    """Moves tool results out of the messages into a window of documents before the conversation.

    A new result is shown where it stands until the model has answered it; then it is a document, and a
    reference stands in its place. The state's messages stay whole, so any checkpointer keeps what is needed;
    the window is a function of them, and a document whose message is removed leaves it. Every thread has a
    namespace of its own: threads share neither documents nor KV.

    Args:
        window: documents at most, the newest; None: all.
        newest: `in-place` as said above; `document` moves new results into the window at once, so that their
            tokens are computed once instead of twice, and the model must follow a reference to them.
        shortest: characters from which on a tool result is a document; a shorter one stays where it is.
        namespace: before the thread's id in the namespace of its KV.
        unsupported_model: what to do with another chat model than ChatRollingKV, which gets its request
            unchanged: `warn`, `ignore`, or `raise`.
    """

    state_schema = RollingKVState
    trace_policy = TracePolicy(process_inputs=omit_payload)

    def __init__(
        self,
        *,
        window: int | None = None,
        newest: Literal["in-place", "document"] = "in-place",
        shortest: int = 32,
        namespace: str = "default",
        unsupported_model: Literal["warn", "ignore", "raise"] = "warn",
    ) -> None:
        super().__init__()
        if window is not None and window < 1:
            raise ConfigError(f"window is {window}; expected at least 1, or None for no bound.")
        if newest not in ("in-place", "document"):
            raise ConfigError(f"newest is {newest!r}; expected in-place or document.")
        if unsupported_model not in ("warn", "ignore", "raise"):
            raise ConfigError(f"unsupported_model is {unsupported_model!r}; expected warn, ignore or raise.")
        self.window = window
        self.newest = newest
        self.shortest = shortest
        self.namespace = namespace
        self.unsupported_model = unsupported_model

    def before_model(self, state: RollingKVState, runtime: Runtime[Any]) -> dict[str, Any]:
        """Brings the window up to the messages."""
        past = state["messages"][: self._answered(state["messages"])]
        keys = list(documents_of(past, shortest=self.shortest))
        return {"rolling_kv_window": keys[-self.window :] if self.window else keys}

    async def abefore_model(self, state: RollingKVState, runtime: Runtime[Any]) -> dict[str, Any]:
        return self.before_model(state, runtime)

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelCallResult[Any]:
        return handler(self._rolled(request))

    async def awrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
    ) -> ModelCallResult[Any]:
        return await handler(self._rolled(request))

    def _rolled(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        if not isinstance(request.model, ChatRollingKV):
            self._unsupported(request.model)
            return request
        answered = self._answered(request.messages)
        past, new = request.messages[:answered], request.messages[answered:]
        texts = documents_of(past, shortest=self.shortest)
        state: Any = request.state
        window = [key for key in state.get("rolling_kv_window", []) if key in texts]
        return request.override(
            messages=[*referring(past, window, shortest=self.shortest), *new],
            model_settings={
                **request.model_settings,
                "documents": [{"id": reference(key), "text": texts[key]} for key in window],
                "namespace": self._namespace(request.runtime),
            },
        )

    def _answered(self, messages: Sequence[AnyMessage]) -> int:
        """How many messages the model has answered; all of them count when new results go to the window."""
        if self.newest == "document":
            return len(messages)
        last = (n for n in range(len(messages), 0, -1) if isinstance(messages[n - 1], AIMessage))
        return next(last, 0)

    def _namespace(self, runtime: Runtime[Any] | None) -> str:
        execution = None if runtime is None else runtime.execution_info
        thread = None if execution is None else execution.thread_id
        return self.namespace if thread is None else f"{self.namespace}/{thread}"

    def _unsupported(self, model: Any) -> None:
        message = (
            f"RollingKVMiddleware keeps no KV for a {type(model).__name__}; the request is passed on "
            "unchanged. Use ChatRollingKV, or set unsupported_model='ignore'."
        )
        if self.unsupported_model == "raise":
            raise ConfigError(message)
        if self.unsupported_model == "warn":
            warnings.warn(message, stacklevel=3)
