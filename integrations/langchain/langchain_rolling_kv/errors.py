"""The errors of langchain_rolling_kv; each is one of rolling_kv's, and one of LangChain's where that has it.

RollingKVError (rolling_kv)
├── ConfigError
│   └── SchemaError              a tool's or an answer's schema cannot be kept to
└── PromptError
    ├── PromptOverflowError      more tokens than the model has positions; also a ContextOverflowError
    ├── UnsupportedContentError  a message holds something else than text
    └── IncompleteAnswerError    the answer ended before what was asked for was whole
ReplayMissError (LookupError)    nothing was recorded for this call
"""

from __future__ import annotations

from langchain_core.exceptions import ContextOverflowError

from rolling_kv.errors import ConfigError, PromptError


class SchemaError(ConfigError):
    """A tool's or an answer's JSON schema cannot be turned into a grammar."""


class PromptOverflowError(PromptError, ContextOverflowError):
    """The prompt and the answer need more positions than the model has."""


class UnsupportedContentError(PromptError):
    """A message holds something else than text."""


class IncompleteAnswerError(PromptError):
    """The answer ended before the tool call or the JSON that was asked for was whole."""


class ReplayMissError(LookupError):
    """A replayed run made a call that was not recorded."""
