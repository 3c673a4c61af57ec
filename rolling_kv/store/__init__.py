"""What is kept: lineage, index, payloads, integrity."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rolling_kv.store.lineage import Lineage, make_lineage

if TYPE_CHECKING:
    from rolling_kv.store.base import KVStore


def open_store(folder: str | Path | None) -> KVStore:
    """A store in `folder`, or in memory when there is none."""
    if folder is None:
        from rolling_kv.store.memory import MemoryStore

        return MemoryStore()
    from rolling_kv.store.disk import DiskStore

    return DiskStore(Path(folder))


__all__ = ["Lineage", "make_lineage", "open_store"]
