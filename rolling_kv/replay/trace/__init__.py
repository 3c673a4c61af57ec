"""The trace of a session: its history on disk, so that it can be audited and replayed."""

from __future__ import annotations

from rolling_kv.replay.trace.reader import (
    RecordedDocument,
    RecordedRequest,
    Recording,
    Section,
    read_trace,
)
from rolling_kv.replay.trace.recorder import Recorder, record_sessions, recorder_of

__all__ = [
    "RecordedDocument",
    "RecordedRequest",
    "Recorder",
    "Recording",
    "Section",
    "read_trace",
    "record_sessions",
    "recorder_of",
]
