"""What is kept: lineage, index, payloads, integrity."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rolling_kv.errors import ConfigError
from rolling_kv.store.lineage import Lineage, make_lineage, token_digest

if TYPE_CHECKING:
    from rolling_kv.store.base import KVStore


def open_store(
    folder: str | Path | None,
    *,
    quota: int | None = None,
    ttl: float | None = None,
    memory_limit: int | None = None,
) -> KVStore:
    """A store in `folder`, or in memory when there is none.

    Args:
        quota: bytes of payloads that the folder keeps at most, the most recently used. None: no bound.
        ttl: seconds after which KV in the folder that was not used is removed. None: never.
        memory_limit: bytes that a store in memory keeps at most. None: 4 GiB.

    Raises:
        ConfigError: a bound is not positive, or belongs to the other kind of store. StoreError
    """
    if folder is None:
        from rolling_kv.store.memory import DEFAULT_LIMIT, MemoryStore

        if quota is not None or ttl is not None:
            raise ConfigError(
                "quota= and ttl= bound a store in a folder. Pass store= a folder, or memory_limit=."
            )
        return MemoryStore(limit=DEFAULT_LIMIT if memory_limit is None else memory_limit)
    from rolling_kv.store.disk import DiskStore

    if memory_limit is not None:
        raise ConfigError("memory_limit= bounds a store in memory. Pass store=None, or quota=.")
    return DiskStore(Path(folder), quota=quota, ttl=ttl)


__all__ = ["Lineage", "make_lineage", "open_store", "token_digest"]
