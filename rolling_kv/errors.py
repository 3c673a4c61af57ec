"""The error tree of rolling_kv. Every message says what was wrong, what was expected, and what to do.

RollingKVError
├── ConfigError                  an argument or setting outside what is allowed
│   ├── UnknownPolicyError       no recompute policy of that name
│   ├── UnknownConditioningError no conditioning mode of that name
│   ├── UnknownWorkloadError     no labelled workload of that name
│   └── InvalidRatioError        a ratio outside 0..1
├── WindowError                  the window cannot do what was asked
│   ├── EmptyDocumentError       a document without text
│   ├── UnknownDocumentError     no document of that id in the window
│   ├── DuplicateDocumentError   a document of that id is in the window already
│   ├── DocumentTooLongError     one document alone exceeds the window's token bound
│   └── WindowFullError          nothing may be evicted, because every document is pinned
├── PromptError                  the prompt cannot be built or run
│   ├── TemplateError            the model's chat template cannot carry a window
│   ├── PromptTooLongError       more tokens than the model has positions
│   └── AnswerUnfinishedError    decoding failed, or its stream was closed, before the answer's end
├── ModelError                   the model cannot be used
│   ├── ModelNotFoundError       nothing of that name on disk, in a package, or on the hub
│   ├── UnsupportedModelError    its family, rope or attention is not supported
│   ├── ProfileError             its stored profile is damaged
│   └── NumericsError            a pass gave numbers that are not finite
├── StoreError                   the store cannot do what was asked
│   ├── StoreModelMismatchError  the namespace holds KV of another model
│   ├── StoreReadOnlyError       the folder cannot be written
│   ├── StoreFullError           the disk is full
│   ├── StoreLockedError         another process holds the index for too long
│   ├── StoreFormatError         not a store, or one of another format version
│   └── CorruptPayloadError      a payload failed its checksum, shape or lineage
├── TraceError                   a recorded history cannot be written, read or replayed
│   ├── TraceFormatError         not a trace, or one of another format version
│   ├── TraceDamagedError        a line was altered, or is missing
│   ├── TraceInUseError          another session records to the same file
│   ├── TraceTextError           it holds hashes in the place of texts
│   └── TraceMismatchError       it is of another model, or its prompts cannot be made again
├── BenchError                   a measurement cannot be run or go on
│   └── MissingExtraError        it needs a package that is not installed
└── SessionClosedError           the session was used after close()
"""

from __future__ import annotations


class RollingKVError(Exception):
    """Base of everything that rolling_kv raises on purpose."""


class ConfigError(RollingKVError):
    """An argument or setting is outside what is allowed."""


class UnknownPolicyError(ConfigError):
    """There is no recompute policy of that name."""


class UnknownConditioningError(ConfigError):
    """There is no conditioning mode of that name."""


class UnknownWorkloadError(ConfigError):
    """There is no labelled workload of that name."""


class InvalidRatioError(ConfigError):
    """A recompute ratio is not a number from 0 to 1."""


class WindowError(RollingKVError):
    """The window cannot do what was asked; it is unchanged."""


class EmptyDocumentError(WindowError):
    """A document has no text, or only white space."""


class UnknownDocumentError(WindowError):
    """No document of that id is in the window."""


class DuplicateDocumentError(WindowError):
    """A document of that id is in the window already."""


class DocumentTooLongError(WindowError):
    """One document alone exceeds the window's token bound."""


class WindowFullError(WindowError):
    """The window is full and every document in it is pinned."""


class PromptError(RollingKVError):
    """The prompt cannot be built or run."""


class TemplateError(PromptError):
    """The model's chat template cannot carry a window of documents."""


class PromptTooLongError(PromptError):
    """The prompt and the answer need more positions than the model has."""


class AnswerUnfinishedError(PromptError):
    """Decoding failed, or its stream was closed, before the answer's end."""


class ModelError(RollingKVError):
    """The model cannot be used."""


class ModelNotFoundError(ModelError):
    """No model of that name on disk, in an installed package, or on the hub."""


class UnsupportedModelError(ModelError):
    """The model's family, rope or attention is not supported."""


class ProfileError(ModelError):
    """The stored profile of a model is damaged, or of another model."""


class NumericsError(ModelError):
    """A pass of the model gave numbers that are not finite."""


class StoreError(RollingKVError):
    """The store cannot do what was asked; what it held is unchanged."""


class StoreModelMismatchError(StoreError):
    """The namespace of this store holds KV of another model."""


class StoreReadOnlyError(StoreError):
    """The store's folder cannot be written."""


class StoreFullError(StoreError):
    """The disk (or the quota) under the store is full."""


class StoreLockedError(StoreError):
    """Another process holds the store's index for too long."""


class StoreFormatError(StoreError):
    """The folder is not a rolling_kv store, or one of another format version."""


class CorruptPayloadError(StoreError):
    """A stored payload failed its checksum, shape or lineage; it was quarantined."""


class TraceError(RollingKVError):
    """A recorded history cannot be written, read or replayed."""


class TraceFormatError(TraceError):
    """The file is not a trace, or one of another format version."""


class TraceDamagedError(TraceError):
    """A line of a trace was altered, or a line is missing before it."""


class TraceInUseError(TraceError):
    """Another session records to the same file."""


class TraceTextError(TraceError):
    """A trace holds hashes in the place of texts, so that nothing can be replayed from it."""


class TraceMismatchError(TraceError):
    """A trace is of another model, or the prompts made from it are not those that were recorded."""


class BenchError(RollingKVError):
    """A measurement cannot be run, or not go on."""


class MissingExtraError(BenchError):
    """A measurement needs a package that is not installed."""


class SessionClosedError(RollingKVError):
    """The session was used after it was closed."""
