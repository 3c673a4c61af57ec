"""Where stored KV is when a request of `rolling-kv bench ttft` comes: setups, and stores that make them."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolling_kv.bench.layered import Layered
from rolling_kv.session import RollingSession
from rolling_kv.store import open_store

if TYPE_CHECKING:
    from rolling_kv.config import SessionConfig
    from rolling_kv.engine.host import TransformersHost
    from rolling_kv.store.base import KVStore

_PLENTY = 1 << 40  # bytes; nothing is dropped


@dataclass(frozen=True, slots=True)
class Setup:
    """What is at hand when a request with one new document comes.

    Args:
        disk: the store is a folder, else memory.
        at_append: the new document is ingested when it is appended, else by the request.
        resident: the KV of the last request is in the session's memory, as it is when a window rolls; else
            the session is new, and finds it in the store.
        empty: nothing is stored at all.
        idle: what the slide takes was computed between the calls (`preroll="slide"`).
    """

    name: str
    disk: bool
    at_append: bool = False
    resident: bool = True
    empty: bool = False
    idle: bool = False


SETUPS = {
    setup.name: setup
    for setup in (
        Setup("append", disk=False, at_append=True),
        Setup("idle", disk=False, at_append=True, idle=True),
        Setup("ask", disk=False),
        Setup("disk-append", disk=True, at_append=True),
        Setup("disk-ask", disk=True),
        Setup("warm", disk=True, resident=False),
        Setup("cold", disk=True, resident=False, empty=True),
    )
}


class Base:
    """The KV of the window before a request, under one conditioning, in memory or in a folder of its own.

    Args:
        config: of the sessions; its policy decides whether anchors are kept.
    """

    def __init__(self, engine: TransformersHost, config: SessionConfig, *, disk: bool) -> None:
        self._engine = engine
        self._config = config
        self._folder = tempfile.TemporaryDirectory(prefix="rolling_kv-ttft-")
        self.disk = disk
        self.store = self._new("base")
        self._count = 0

    def close(self) -> None:
        self.store.close()
        self._folder.cleanup()

    def hold(self, documents: Sequence[str], *, progress: Any = None) -> None:
        """Computes and keeps what of a window is missing."""
        with RollingSession(
            engine=self._engine, store=Layered(self.store, self.store), config=self._config
        ) as session:
            session.extend(documents, progress=progress)

    @contextmanager
    def session(self, setup: Setup, documents: Sequence[str]) -> Iterator[RollingSession]:
        """A session over the window `documents`, as `setup` has it; what it computes is not kept."""
        self._count += 1
        top = self._new(f"top-{self._count}")
        try:
            store = Layered(self._new(f"none-{self._count}") if setup.empty else self.store, top)
            changed = {"ingest": "eager" if setup.at_append else "lazy"}
            if setup.idle:
                changed["preroll"] = "slide"
            config = self._config.model_copy(update=changed)
            with RollingSession(engine=self._engine, store=store, config=config) as session:
                session.extend(documents)
                if setup.resident and not setup.at_append:
                    session.ask("And before?", policy="direct-reuse", max_new_tokens=1)
                yield session
        finally:
            top.close()

    def loading(self, documents: Sequence[str]) -> dict[str, float]:
        """Seconds to load a window from the folder, verified, and to read and sum the same files by numpy."""
        import numpy as np

        with self.session(SETUPS["warm"], documents) as session:
            answer = session.ask("And before?", policy="direct-reuse", max_new_tokens=1)
        names = {f"{key}.safetensors" for key in answer.trace.lineages}
        files = [
            path for path in Path(self._folder.name, "base").rglob("*.safetensors") if path.name in names
        ]
        started = time.perf_counter()
        for path in files:
            np.memmap(path, dtype=np.float32, mode="r", shape=(path.stat().st_size // 4,)).sum()
        return {
            "bytes": sum(path.stat().st_size for path in files),
            "seconds": answer.timing.ingest,
            "memmap_seconds": time.perf_counter() - started,
        }

    def _new(self, name: str) -> KVStore:
        if self.disk:
            return open_store(Path(self._folder.name, name))
        return open_store(None, memory_limit=_PLENTY)
