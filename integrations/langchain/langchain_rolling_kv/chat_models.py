"""`ChatRollingKV`: a LangChain chat model whose past messages and documents keep their KV."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from threading import RLock
from typing import Any, Literal, Self

import xxhash
from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import LangSmithParams, LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel, generate_from_stream
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils import from_env
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from langchain_rolling_kv.answers import choice_of, form_of, last_chunk
from langchain_rolling_kv.errors import IncompleteAnswerError
from langchain_rolling_kv.grammar import schema_instruction
from langchain_rolling_kv.messages import document_turns, instruction_of, turns_of
from langchain_rolling_kv.sessions import ChatSessions
from langchain_rolling_kv.tool_calls import ToolCallReader
from rolling_kv import load_engine
from rolling_kv.config import DEFAULT_CONDITIONING, DEFAULT_POLICY
from rolling_kv.errors import ConfigError
from rolling_kv.store import open_store

_KEPT = ("conditioning", "fresh_tail")  # of a session; no single call may set it otherwise
# What a single call may set otherwise than the model, besides the arguments of `_stream`.
_OVERRIDES = ("temperature", "top_k", "top_p", "seed", "max_tokens", "policy", "ratio")


class ChatRollingKV(BaseChatModel):
    """A local model behind rolling_kv. The model is loaded by the first call.

    Every message, and every document of `documents=`, is a segment of the prompt whose KV is kept under
    `namespace` and used again wherever it comes to stand; `usage_metadata` says how much was. Answers are a
    function of the prompt alone, unless `deterministic=False` admits a conditioning that depends on history.

    Args:
        model: a local folder, a hub id, or `demo`, `smollm2`, `gemma3-270m`; by default of ROLLING_KV_MODEL.
        temperature, top_k, top_p, seed: sampling; greedy at temperature 0.
        max_tokens: of an answer at most.
        stop: strings that end an answer.
        store_path: a folder for KV that outlives the process; None keeps it in memory.
        namespace: keeps KV apart; one agent thread, one namespace (`RollingKVMiddleware` sees to that).
        policy, ratio, conditioning, fresh_tail, deterministic, dtype, device: as for
            `rolling_kv.RollingSession.open`.
        engine: an engine from `rolling_kv.load_engine` to share, instead of loading `model`.
    """

    model_config = ConfigDict(populate_by_name=True)

    model_name: str = Field(default_factory=from_env("ROLLING_KV_MODEL", default="demo"), alias="model")
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    max_tokens: int = 256
    stop: list[str] | None = None
    streaming: bool = False
    store_path: str | None = None
    namespace: str = "default"
    policy: str = DEFAULT_POLICY
    ratio: float | None = None
    conditioning: str = DEFAULT_CONDITIONING
    fresh_tail: int | None = None
    deterministic: bool = True
    dtype: str = "auto"
    device: str = "auto"
    engine_fingerprint: str | None = None
    """Of a given engine's weights, tokenizer, rope, dtype and device, so that caches tell engines apart."""
    engine: Any = Field(default=None, exclude=True, repr=False)

    _sessions: dict[str, ChatSessions] = PrivateAttr(default_factory=dict)
    _lock: Any = PrivateAttr(default_factory=RLock)

    @model_validator(mode="after")
    def _know_the_engine(self) -> Self:
        if self.engine is not None:
            identity = self.engine.identity
            parts = (identity.model, identity.tokenizer, identity.rope, identity.dtype, identity.device)
            self.model_name = self.engine.name
            self.engine_fingerprint = xxhash.xxh3_128_hexdigest("\0".join(parts).encode())
        return self

    @property
    def _llm_type(self) -> str:
        return "rolling-kv"

    @classmethod
    def is_lc_serializable(cls) -> bool:
        return True

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        return ["langchain_rolling_kv", "chat_models"]

    @property
    def _identifying_params(self) -> dict[str, Any]:
        names = ("model_name", "engine_fingerprint", "dtype", "device", "stop", *_KEPT, *_OVERRIDES)
        return {name: getattr(self, name) for name in names}

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        """What decides an answer besides its messages; where KV is kept, and under which name, does not."""
        kwargs.pop("namespace", None)
        decisive = {**self._identifying_params, **kwargs, "stop": self.stop if stop is None else stop}
        return json.dumps(decisive, sort_keys=True, default=repr)

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = LangSmithParams(
            ls_provider="rolling_kv",
            ls_model_type="chat",
            ls_model_name=kwargs.get("model") or self.model_name,
            ls_temperature=kwargs.get("temperature", self.temperature),
            ls_max_tokens=kwargs.get("max_tokens", self.max_tokens),
        )
        if stops := stop or self.stop:
            params["ls_stop"] = stops
        return params

    def get_token_ids(self, text: str) -> list[int]:
        return list(self.sessions().engine.tokenizer.encode(text, special=False))

    def sessions(self, model: str | None = None) -> ChatSessions:
        """The sessions of this model, or of another one by name, which is loaded when it is new."""
        name = model or self.model_name
        with self._lock:
            if name not in self._sessions:
                engine = self.engine if name == self.model_name else None
                self._sessions[name] = ChatSessions(
                    engine=engine or load_engine(name, dtype=self.dtype, device=self.device),
                    store=open_store(None if self.store_path is None else Path(self.store_path).expanduser()),
                    settings={
                        name: getattr(self, name) for name in ("policy", "ratio", "deterministic", *_KEPT)
                    },
                )
            return self._sessions[name]

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return generate_from_stream(self._stream(messages, stop=stop, run_manager=run_manager, **kwargs))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        *,
        documents: Sequence[Any] = (),
        namespace: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | None = None,
        response_schema: Mapping[str, Any] | None = None,
        model: str | None = None,
        **overrides: Any,
    ) -> Iterator[ChatGenerationChunk]:
        """The one way to an answer. New tokens are reported to callbacks by the caller.

        Args:
            documents: the window: texts, mappings of `id` and `text`, or LangChain documents; they stand
                between the instruction and the messages.
            namespace, model: instead of the model's own, for this call.
            tools, tool_choice: as `bind_tools` leaves them.
            response_schema: the answer is JSON of this schema.
        """
        sessions = self.sessions(model)
        instruction, rest = instruction_of(messages)
        turns = [*document_turns(documents), *turns_of(rest, native_tools=sessions.native_tools)]
        if not turns:
            raise ConfigError(
                "There is nothing to answer: pass at least one message that is no system message."
            )
        if response_schema is not None:
            instruction = f"{instruction}\n\n{schema_instruction(response_schema)}"
        form = form_of(tools, tool_choice, response_schema)
        name = namespace or self.namespace
        stream, written = sessions.stream(
            turns,
            namespace=name if sessions is self.sessions() else f"{name}@{model}",
            instruction=instruction,
            tools=tools,
            grammar=form,
            stop=stop if stop is not None else self.stop or (),
            **self._decoding(overrides),
        )
        reader = ToolCallReader() if tools and tool_choice != "none" else None
        for piece in stream:
            if text := piece if reader is None else reader.feed(piece):
                yield ChatGenerationChunk(message=AIMessageChunk(content=text))
        answer = stream.answer
        if form is not None and tool_choice != "none" and answer.finish_reason != "eos":
            raise IncompleteAnswerError(
                f"The answer ended ({answer.finish_reason}) after {answer.usage.output} tokens, before the "
                f"{'tool call' if tools else 'JSON'} that was asked for was whole: {answer.text[-80:]!r}. "
                "Raise max_tokens, drop stop strings, or use a more able model."
            )
        made = sum(len(message.tool_calls) for message in rest if isinstance(message, AIMessage))
        yield last_chunk(
            answer,
            text="" if reader is None else reader.rest(),
            calls=[] if reader is None else reader.calls(before=made),
            written=written,
            model_name=model or self.model_name,
        )

    def _decoding(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        unknown = sorted(set(overrides) - set(_OVERRIDES))
        if unknown:
            raise ConfigError(
                f"A call cannot set {', '.join(unknown)}; it may set {', '.join(_OVERRIDES)}, documents, "
                "namespace, tools, tool_choice, response_schema and model."
            )
        of_session = ("policy", "ratio")  # which has the model's own
        own = {name: getattr(self, name) for name in _OVERRIDES if name not in of_session}
        chosen: dict[str, Any] = {**own, **overrides}
        chosen["max_new_tokens"] = chosen.pop("max_tokens")
        return chosen

    def bind_tools(
        self,
        tools: Sequence[Mapping[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | bool | Mapping[str, Any] | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with tools that it may call.

        Args:
            tool_choice: `auto` (or None) leaves it to the model; `any`, a tool's name, or True makes it call
                one, well-formed whatever the model; `none` keeps it from calling.
            strict, parallel_tool_calls: taken for other models' sake: a forced call always keeps to its
                schema, and is one.
        """
        definitions = [convert_to_openai_tool(tool) for tool in tools]
        choice = choice_of(tool_choice, [tool["function"]["name"] for tool in definitions])
        return self.bind(tools=definitions, tool_choice=choice, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        method: Literal["function_calling", "json_schema", "json_mode"] = "function_calling",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Answers of `schema`: as a forced tool call, or as JSON that keeps to it (`json_mode`: any JSON)."""
        if method == "function_calling":
            return super().with_structured_output(schema, include_raw=include_raw, **kwargs)
        llm = self.bind(
            response_schema={"type": "object"} if method == "json_mode" else convert_to_json_schema(schema),
            ls_structured_output_format={"kwargs": {"method": method}, "schema": schema},
            **kwargs,
        )
        parser: Runnable[AIMessage, Any] = JsonOutputParser()
        if isinstance(schema, type) and is_basemodel_subclass(schema):
            parser = PydanticOutputParser(pydantic_object=schema)
        if not include_raw:
            return llm | parser
        parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=llm) | parsed.with_fallbacks([failed], exception_key="parsing_error")
