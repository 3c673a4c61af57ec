"""The store's index: one SQLite database, in WAL mode, through sqlite-utils."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from threading import RLock
from typing import Any

from sqlite_utils import Database

from rolling_kv.errors import StoreFormatError, StoreModelMismatchError
from rolling_kv.kv import ModelIdentity

FORMAT_VERSION = 2

_ROUNDED = (
    "If it is the same model: float16 rounds weights otherwise than bfloat16 does, and the two cannot be "
    "recognised as one. "
)


@dataclass(frozen=True, slots=True)
class SegmentRow:
    """What the index knows of a stored segment.

    Args:
        context_tokens: how many tokens it was computed after.
        checksum: of its lineage and tensors, as the payload's header has it.
        created: seconds since the epoch.
        used: seconds since the epoch, when it was last stored or loaded. Loading is recorded with the next
            write or on closing, so a process that is killed may leave it too early.
    """

    key: str
    namespace: str
    tokens: int
    context_tokens: int
    bytes: int
    checksum: str
    created: float
    used: float


class StoreIndex:
    """Which lineage lies in which file, and which model a namespace belongs to.

    Args:
        path: the database file; made when missing, unless `read_only`.
        lock_timeout: seconds to wait for another process before giving up.
        read_only: nothing is written, so that the folder need not be writable.
    """

    def __init__(self, path: Path, *, lock_timeout: float, read_only: bool = False) -> None:
        self._lock = RLock()
        self._writing = False
        self._used: dict[str, float] = {}  # loads that are not recorded yet
        connection = _connect(path, lock_timeout=lock_timeout, read_only=read_only)
        try:
            self._database = Database(connection)
            self._require_ours(path, new_is_fine=not read_only)
            if not read_only:
                self._database.execute("pragma secure_delete = on")  # what was removed leaves no trace
                self._database.enable_wal()
                self._create_tables()
        except BaseException:
            connection.close()
            raise

    @contextmanager
    def writing(self) -> Iterator[None]:
        """One transaction; inside another one, a part of it. Other processes wait for its end.

        It takes the write lock at once: a transaction that first reads could not wait for it later.
        """
        with self._lock:
            if self._writing:
                yield
                return
            self._database.execute("begin immediate")
            self._writing = True
            try:
                yield
                self._record_uses()
                self._database.commit()
                self._used.clear()
            except BaseException:
                self._database.rollback()
                raise
            finally:
                self._writing = False

    def claim(self, namespace: str, identity: ModelIdentity) -> None:
        row = {"namespace": namespace, **asdict(identity)}
        with self.writing():
            self._database.table("namespaces").insert(row, pk="namespace", ignore=True)
            self._database.execute(  # an index that was rebuilt does not know it
                "update namespaces set name = ? where namespace = ? and name = ''", [identity.name, namespace]
            )
        require_same_model(namespace, owner=self.namespaces()[namespace], claimant=identity)

    def find(self, key: str) -> SegmentRow | None:
        with self._lock:
            rows = self._segments("where key = ?", [key])
            return self._with_use(rows[0]) if rows else None

    def find_many(self, keys: Iterable[str]) -> dict[str, SegmentRow]:
        """Those of `keys` that are there."""
        with self._lock:
            rows = self._segments("where key in (select value from json_each(?))", [json.dumps([*keys])])
            return {row.key: self._with_use(row) for row in rows}

    def add(self, row: SegmentRow, *, digests: Iterable[str]) -> None:
        """Indexes a segment; `digests` are those of its path's steps."""
        with self.writing():
            self._database.table("segments").insert(asdict(row), pk="key", replace=True)
            steps = [{"key": row.key, "digest": digest} for digest in set(digests)]
            self._database.table("steps").insert_all(steps, pk=("key", "digest"), replace=True)

    def use(self, key: str, when: float) -> None:
        """Remembers that a segment was loaded; it is recorded with the next write, or on closing."""
        with self._lock:
            self._used[key] = when

    def remove(self, *keys: str) -> None:
        with self.writing():
            for table in ("segments", "steps", "anchors"):
                self._database.conn.executemany(
                    f"delete from {table} where key = ?", [(key,) for key in keys]
                )
            for key in keys:
                self._used.pop(key, None)

    def find_anchors(self, key: str, kind: str) -> tuple[int, ...] | None:
        rows = self._query("select tokens from anchors where key = ? and kind = ?", [key, kind])
        return tuple(json.loads(rows[0]["tokens"])) if rows else None

    def add_anchors(self, key: str, kind: str, tokens: tuple[int, ...]) -> None:
        """Keeps anchors with their segment; those of a segment that is not stored are not kept."""
        with self.writing():
            self._database.execute(
                "insert or replace into anchors (key, kind, tokens) "
                "select key, ?, ? from segments where key = ?",
                [kind, json.dumps(tokens), key],
            )

    def rows(self) -> list[SegmentRow]:
        """Every segment, by namespace, oldest first."""
        with self._lock:
            rows = self._segments("order by namespace, created, key")
            return [self._with_use(row) for row in rows]

    def by_use(self) -> Iterator[SegmentRow]:
        """Every segment, least recently used first; read one by one when called inside `writing`."""
        with self._lock:
            if not self._writing:
                yield from sorted(self.rows(), key=lambda row: (row.used, row.created, row.key))
                return
            self._record_uses()
            for row in self._database.query("select * from segments order by used, created, key"):
                yield SegmentRow(**row)

    def totals(self) -> tuple[int, int]:
        """How many segments there are, and what their payloads take in bytes."""
        row = self._query("select count(*) as n, coalesce(sum(bytes), 0) as bytes from segments")[0]
        return row["n"], row["bytes"]

    def keys(self) -> set[str]:
        return {row["key"] for row in self._query("select key from segments")}

    def keys_with(self, digest: str, *, namespace: str | None = None) -> list[str]:
        """Segments whose path has a step of that digest."""
        where = "where digest = :digest and (:namespace is null or namespace = :namespace)"
        sql = f"select key from steps join segments using (key) {where} order by key"
        return [row["key"] for row in self._query(sql, {"digest": digest, "namespace": namespace})]

    def namespaces(self) -> dict[str, ModelIdentity]:
        """Which model each namespace belongs to, in the dtype and on the device of its first session."""
        rows = self._query("select * from namespaces order by namespace")
        return {row.pop("namespace"): ModelIdentity(**row) for row in rows}

    def __len__(self) -> int:
        return self.totals()[0]

    def checkpoint(self) -> None:
        """Empties the write-ahead log, which may hold what was removed, unless somebody is reading it."""
        with self._lock:
            self._database.execute("pragma wal_checkpoint(truncate)").fetchall()

    def close(self) -> None:
        with self._lock:
            if self._used:
                with suppress(sqlite3.Error), self.writing():  # last uses are not worth an error
                    pass
            self._database.close()

    def _query(self, sql: str, parameters: Any = ()) -> list[dict[str, Any]]:
        with self._lock:  # the library's own `query` runs two more statements, a savepoint
            cursor = self._database.execute(sql, parameters)
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor]

    def _segments(self, clause: str = "", parameters: Any = ()) -> list[SegmentRow]:
        return [SegmentRow(**row) for row in self._query(f"select * from segments {clause}", parameters)]

    def _record_uses(self) -> None:
        used = [(when, key) for key, when in self._used.items()]
        self._database.conn.executemany("update segments set used = max(used, ?) where key = ?", used)

    def _with_use(self, row: SegmentRow) -> SegmentRow:
        """`row` with a load that is not recorded yet."""
        used = self._used.get(row.key, row.used)
        return replace(row, used=used) if used > row.used else row

    def _require_ours(self, path: Path, *, new_is_fine: bool) -> None:
        version = self._version()
        if version == 0 and (self._database.table_names() or not new_is_fine):
            raise StoreFormatError(
                f"{path} is a database, but not an index of rolling_kv. Pass another store folder."
            )
        if version not in (0, FORMAT_VERSION):
            raise StoreFormatError(
                f"{path} has format version {version}; this release reads version {FORMAT_VERSION}. "
                "Use another store folder, or the release that wrote it."
            )

    def _version(self) -> int:
        return int(self._query("pragma user_version")[0]["user_version"])

    def _create_tables(self) -> None:
        if self._version() == FORMAT_VERSION:
            return
        row = {"key": str, "namespace": str, "tokens": int, "context_tokens": int, "bytes": int}
        owner = {"namespace": str, **{field.name: str for field in fields(ModelIdentity)}}
        with self.writing():
            create = self._database.create_table
            segments = create("segments", row | {"checksum": str, "created": float, "used": float}, pk="key")
            segments.create_index(["used", "created", "key"])
            create("steps", {"key": str, "digest": str}, pk=("key", "digest")).create_index(["digest"])
            create("namespaces", owner, pk="namespace")
            create("anchors", {"key": str, "kind": str, "tokens": str}, pk=("key", "kind"))
            self._database.execute(f"pragma user_version = {FORMAT_VERSION}")


def _connect(path: Path, *, lock_timeout: float, read_only: bool) -> sqlite3.Connection:
    if not read_only:
        return sqlite3.connect(path, timeout=lock_timeout, check_same_thread=False)
    place = path.absolute().as_uri()
    connection = sqlite3.connect(f"{place}?mode=ro", timeout=lock_timeout, check_same_thread=False, uri=True)
    try:
        connection.execute("select count(*) from sqlite_master").fetchone()
        return connection
    except sqlite3.OperationalError:
        connection.close()
        log = path.with_name(f"{path.name}-wal")
        if not path.exists() or (log.exists() and log.stat().st_size):
            raise
    # In a folder that is not writable SQLite cannot make the files that readers and writers share; where
    # nobody is writing there is no need of them.
    return sqlite3.connect(f"{place}?immutable=1", check_same_thread=False, uri=True)


def require_same_model(namespace: str, *, owner: ModelIdentity, claimant: ModelIdentity) -> None:
    """Checks that two identities are one model, in whichever dtype, on whichever device.

    Raises:
        StoreModelMismatchError: says which part differs.
    """
    for part in ("model", "tokenizer"):
        theirs, ours = (str(getattr(one, "values" if part == "model" else part)) for one in (owner, claimant))
        if theirs != ours:
            rounded = "float16" in (owner.dtype, claimant.dtype) and owner.dtype != claimant.dtype
            raise StoreModelMismatchError(
                f"Namespace {namespace!r} of this store holds KV of the model {owner.name!r} ({part} "
                f"{theirs[:12]}), and the session's model is {claimant.name!r} ({part} {ours[:12]}). "
                + (_ROUNDED if rounded and part == "model" else "")
                + "Pass another namespace= or another store= folder, or open that model."
            )
