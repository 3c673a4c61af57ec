"""rolling_kv: fast, history-independent answers over a rolling window of documents."""

from rolling_kv.answer import Answer, Continuation, SelectionStats, Timing, Trace, Usage, WindowChange
from rolling_kv.async_session import AsyncRollingSession
from rolling_kv.config import SessionSettings
from rolling_kv.engine import load_engine
from rolling_kv.errors import RollingKVError
from rolling_kv.options import AskOptions, PrefillOptions
from rolling_kv.preroll import PrerollReport
from rolling_kv.provenance import Provenance
from rolling_kv.session import RollingSession
from rolling_kv.stream import AnswerStream
from rolling_kv.window.document import Document

__all__ = [
    "Answer",
    "AnswerStream",
    "AskOptions",
    "AsyncRollingSession",
    "Continuation",
    "Document",
    "PrefillOptions",
    "PrerollReport",
    "Provenance",
    "RollingKVError",
    "RollingSession",
    "SelectionStats",
    "SessionSettings",
    "Timing",
    "Trace",
    "Usage",
    "WindowChange",
    "load_engine",
]
