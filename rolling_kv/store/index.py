"""The store's index: one SQLite database, in WAL mode, through sqlite-utils."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import RLock

from sqlite_utils import Database

from rolling_kv.errors import StoreFormatError, StoreModelMismatchError
from rolling_kv.kv import ModelIdentity

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """What the index knows of a stored segment.

    Args:
        context_tokens: how many tokens it was computed after.
        checksum: xxh3-128 (hex) of the payload file.
        created: seconds since the epoch.
    """

    key: str
    namespace: str
    tokens: int
    context_tokens: int
    bytes: int
    checksum: str
    created: float


class StoreIndex:
    """Which lineage lies in which file, and which model a namespace belongs to.

    Args:
        path: the database file; made when missing.
        lock_timeout: seconds to wait for another process before giving up.
    """

    def __init__(self, path: Path, *, lock_timeout: float) -> None:
        self._lock = RLock()
        connection = sqlite3.connect(path, timeout=lock_timeout, check_same_thread=False)
        try:
            self._database = Database(connection)
            self._require_ours(path)
            self._database.enable_wal()
            self._create_tables()
        except BaseException:
            connection.close()
            raise

    def claim(self, namespace: str, identity: ModelIdentity) -> None:
        row = {"namespace": namespace, **asdict(identity)}
        with self._transaction():
            self._database.table("namespaces").insert(row, pk="namespace", ignore=True)
            owner = next(self._database.query("select * from namespaces where namespace = ?", [namespace]))
        for part in ("model", "tokenizer"):
            theirs, ours = owner[part], getattr(identity, part)
            if theirs != ours:
                raise StoreModelMismatchError(
                    f"Namespace {namespace!r} of this store holds KV of the model {owner['name']!r} ({part} "
                    f"{theirs[:12]}), and the session's model is {identity.name!r} ({part} {ours[:12]}). "
                    "Pass another namespace= or another store= folder, or open that model."
                )

    def find(self, key: str) -> SegmentRow | None:
        with self._lock:
            row = next(self._database.query("select * from segments where key = ?", [key]), None)
        return None if row is None else SegmentRow(**row)

    def add(self, row: SegmentRow) -> None:
        with self._transaction():
            self._database.table("segments").insert(asdict(row), pk="key", replace=True)

    def remove(self, key: str) -> None:
        with self._transaction():
            self._database.execute("delete from segments where key = ?", [key])

    def find_anchors(self, key: str, kind: str) -> tuple[int, ...] | None:
        with self._lock:
            found = self._database.query("select * from anchors where key = ? and kind = ?", [key, kind])
            row = next(found, None)
        return None if row is None else tuple(json.loads(row["tokens"]))

    def add_anchors(self, key: str, kind: str, tokens: tuple[int, ...]) -> None:
        row = {"key": key, "kind": kind, "tokens": json.dumps(tokens)}
        with self._transaction():
            self._database.table("anchors").insert(row, pk=("key", "kind"), replace=True)

    def rows(self) -> list[SegmentRow]:
        """Every segment, by namespace, oldest first."""
        with self._lock:
            found = self._database.query("select * from segments order by namespace, created, key")
            return [SegmentRow(**row) for row in found]

    def namespaces(self) -> dict[str, ModelIdentity]:
        """Which model each namespace belongs to."""
        with self._lock:
            rows = list(self._database.query("select * from namespaces order by namespace"))
        return {row.pop("namespace"): ModelIdentity(**row) for row in rows}

    def __len__(self) -> int:
        with self._lock:
            return int(next(self._database.query("select count(*) as n from segments"))["n"])

    def close(self) -> None:
        with self._lock:
            self._database.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Takes the write lock at once: a transaction that first reads could not wait for it later."""
        with self._lock:
            self._database.execute("begin immediate")
            try:
                yield
            except BaseException:
                self._database.rollback()
                raise
            self._database.commit()

    def _require_ours(self, path: Path) -> None:
        version = self._version()
        if version == 0 and self._database.table_names():
            raise StoreFormatError(
                f"{path} is a database, but not an index of rolling_kv. Pass another store folder."
            )
        if version not in (0, FORMAT_VERSION):
            raise StoreFormatError(
                f"{path} has format version {version}; this release reads version {FORMAT_VERSION}. "
                "Use another store folder, or the release that wrote it."
            )

    def _version(self) -> int:
        return int(next(self._database.query("pragma user_version"))["user_version"])

    def _create_tables(self) -> None:
        if self._version() == FORMAT_VERSION:
            return
        columns: dict[str, type] = {"key": str, "namespace": str, "tokens": int, "context_tokens": int}
        owner = dict.fromkeys(("namespace", "name", "model", "tokenizer", "rope", "dtype", "device"), str)
        with self._transaction():
            self._database.table("segments").create(
                columns | {"bytes": int, "checksum": str, "created": float}, pk="key"
            )
            self._database.table("namespaces").create(owner, pk="namespace")
            self._database.table("anchors").create(
                {"key": str, "kind": str, "tokens": str}, pk=("key", "kind")
            )
            self._database.execute(f"pragma user_version = {FORMAT_VERSION}")
