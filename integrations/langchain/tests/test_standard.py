"""LangChain's own test suites: a tiny real model with tools off, and a scripted one with tools on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_rolling_kv import ChatRollingKV, chat_models
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests
from scripted import loaded_once, scripted_engine, tiny_engine

from tests.tiny_models import CHATML, HERMES

LONG = "A record says that Ferrant Steel closed at 518.55 dollars. " * 4


class TestUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[ChatRollingKV]:
        return ChatRollingKV

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "smollm2"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return {"ROLLING_KV_MODEL": "gemma3-270m"}, {}, {"model_name": "gemma3-270m"}

    @pytest.mark.xfail(strict=True, reason="load() knows the classes of LangChain's own map only")
    def test_serdes(self, model: BaseChatModel, snapshot: Any) -> None:
        super().test_serdes(model, snapshot)


class Suite(ChatModelIntegrationTests):
    """What all engines are tested with."""

    model_override_value = "a folder, set by the fixture `model`"

    @property
    def chat_model_class(self) -> type[ChatRollingKV]:
        return ChatRollingKV

    @property
    def supported_usage_metadata_details(self) -> dict[Literal["invoke", "stream"], list[Any]]:
        details = ["cache_read_input", "cache_creation_input"]
        return {"invoke": details, "stream": details}

    @property
    def supports_json_mode(self) -> bool:
        return self.has_tool_calling

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return super().standard_chat_model_params | {"max_tokens": 200 if self.has_tool_calling else 24}

    @pytest.fixture
    def model(
        self, request: pytest.FixtureRequest, other_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> BaseChatModel:
        monkeypatch.setattr(chat_models, "load_engine", loaded_once)
        type(self).model_override_value = str(other_folder)
        settings = (
            self.standard_chat_model_params | self.chat_model_params | (getattr(request, "param", {}) or {})
        )
        self._model = ChatRollingKV(**settings)
        return self._model

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        message = self._answer("creation", stream=stream)
        assert message.usage_metadata["input_token_details"]["cache_creation"] > 200
        assert message.usage_metadata["input_token_details"]["cache_read"] == 0
        return message

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        self._answer("read", stream=stream)
        message = self._answer("read", stream=stream)
        usage = message.response_metadata["rolling_kv"]
        details = message.usage_metadata["input_token_details"]
        assert details["cache_read"] == usage["prefix"] + usage["reused"] > 200
        assert details["cache_creation"] == 0
        return message

    def _answer(self, namespace: str, *, stream: bool) -> AIMessage:
        conversation = [HumanMessage(LONG), AIMessage("Noted."), HumanMessage("What did it close at?")]
        if not stream:
            return self._model.invoke(conversation, namespace=namespace)
        chunks = list(self._model.stream(conversation, namespace=namespace))
        return sum(chunks[1:], chunks[0])


class TestIntegrationRealModel(Suite):
    """Without tools, which random weights know nothing of."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": tiny_engine(), "dtype": "float32"}

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False


class TestIntegrationToolsByPrompt(Suite):
    """A chat template that knows nothing of tools."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": scripted_engine(CHATML), "dtype": "float32"}


class TestIntegrationToolsByTemplate(TestIntegrationToolsByPrompt):
    """A chat template that lists tools, calls and results; structured output as JSON instead of a call."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": scripted_engine(HERMES), "dtype": "float32"}

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "json_schema"}
