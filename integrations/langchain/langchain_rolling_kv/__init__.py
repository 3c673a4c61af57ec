"""LangChain agents over rolling_kv."""

from langchain_rolling_kv.chat_models import ChatRollingKV
from langchain_rolling_kv.errors import (
    IncompleteAnswerError,
    PromptOverflowError,
    ReplayMissError,
    SchemaError,
    UnsupportedContentError,
)
from langchain_rolling_kv.middleware import RollingKVMiddleware
from langchain_rolling_kv.replay_cache import ReplayCache
from langchain_rolling_kv.retrievers import RollingKVRetriever

__all__ = [
    "ChatRollingKV",
    "IncompleteAnswerError",
    "PromptOverflowError",
    "ReplayCache",
    "ReplayMissError",
    "RollingKVMiddleware",
    "RollingKVRetriever",
    "SchemaError",
    "UnsupportedContentError",
]
