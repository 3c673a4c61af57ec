"""Forgetting: everything that was computed from a document, wherever in a store's folder it lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rolling_kv.errors import CorruptPayloadError
from rolling_kv.store.folder import StoreFolder
from rolling_kv.store.index import StoreIndex
from rolling_kv.store.payload import read_origin


def forget(folder: StoreFolder, index: StoreIndex, *, namespace: str, token_digest: str) -> int:
    """Removes files, rows and anchors of every segment whose path has a step of that digest.

    Files that no row knows are looked into: quarantined ones, unfinished ones, and those of a process that
    died before it indexed them. One whose header cannot be read goes as well, since it may hold the document.
    Files are unlinked, not overwritten.

    Returns:
        How many segments there were.
    """
    with index.writing():
        keys = set(index.keys_with(token_digest, namespace=namespace))
        files = [folder.path(key) for key in keys]
        indexed = index.keys()
        unindexed = [path for path in folder.payloads() if path.stem not in indexed]
        for path in [*unindexed, *folder.leavings()]:
            origin = _origin(path)
            if origin is None:
                if path.parent != folder.temporary:  # there it is a write that has not come to the KV yet
                    files.append(path)
            elif origin["lineage"]["namespace"] == namespace and _computed_from(origin, token_digest):
                keys.add(origin["key"])
                files.append(path)
        for path in files:
            path.unlink(missing_ok=True)
        index.remove(*keys)
    index.checkpoint()
    return len(keys)


def holds(folder: StoreFolder, index: StoreIndex, *, token_digest: str) -> list[str]:
    """Keys, of any namespace, that the index or the header of any file traces back to that digest."""
    keys = set(index.keys_with(token_digest))
    for path in [*folder.payloads(), *folder.leavings()]:
        origin = _origin(path)
        if origin is not None and _computed_from(origin, token_digest):
            keys.add(origin["key"])
    return sorted(keys)


def _origin(path: Path) -> dict[str, Any] | None:
    try:
        return read_origin(path)
    except (CorruptPayloadError, FileNotFoundError):
        return None


def _computed_from(origin: dict[str, Any], token_digest: str) -> bool:
    return any(digest == token_digest for _, _, digest in origin["lineage"]["path"])
