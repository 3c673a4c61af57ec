"""`RollingKVMiddleware`: an agent whose tool results and retrieved documents roll through a window."""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable
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
from langgraph.runtime import Runtime

from langchain_rolling_kv.chat_models import ChatRollingKV
from langchain_rolling_kv.window import documents_of, reference, referring
from rolling_kv.errors import ConfigError


class RollingKVState(AgentState[Any]):
    """What an agent's state has besides its messages: the window, as content hashes, oldest first."""

    rolling_kv_window: NotRequired[Annotated[list[str], PrivateStateAttr]]


class RollingKVMiddleware(AgentMiddleware[RollingKVState, Any, Any]):
    """Moves tool results out of the messages into a window of documents before the conversation.

    The state's messages stay whole, so any checkpointer keeps what is needed; the window is a function of
    them, and a document whose message is removed leaves it. Only what the model is shown is changed. Every
    thread has a namespace of its own: threads share neither documents nor KV.

    Args:
        window: documents at most, the newest; None: all.
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
        shortest: int = 32,
        namespace: str = "default",
        unsupported_model: Literal["warn", "ignore", "raise"] = "warn",
    ) -> None:
        super().__init__()
        if window is not None and window < 1:
            raise ConfigError(f"window is {window}; expected at least 1, or None for no bound.")
        if unsupported_model not in ("warn", "ignore", "raise"):
            raise ConfigError(f"unsupported_model is {unsupported_model!r}; expected warn, ignore or raise.")
        self.window = window
        self.shortest = shortest
        self.namespace = namespace
        self.unsupported_model = unsupported_model

    def before_model(self, state: RollingKVState, runtime: Runtime[Any]) -> dict[str, Any]:
        """Brings the window up to the messages."""
        keys = list(documents_of(state["messages"], shortest=self.shortest))
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
        texts = documents_of(request.messages, shortest=self.shortest)
        state: Any = request.state
        window = [key for key in state.get("rolling_kv_window", []) if key in texts]
        return request.override(
            messages=referring(request.messages, window, shortest=self.shortest),
            model_settings={
                **request.model_settings,
                "documents": [{"id": reference(key), "text": texts[key]} for key in window],
                "namespace": self._namespace(request.runtime),
            },
        )

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
