"""A store in a folder: payload files, an index, and a quarantine for what fails verification."""

from __future__ import annotations

import errno
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from rolling_kv.errors import (
    CorruptPayloadError,
    StoreError,
    StoreFormatError,
    StoreFullError,
    StoreLockedError,
    StoreReadOnlyError,
)
from rolling_kv.kv import ModelIdentity, SegmentKV
from rolling_kv.store.index import StoreIndex
from rolling_kv.store.lineage import Lineage
from rolling_kv.store.payload import read_payload, verify_file, write_payload

_STALE_TEMPORARY = 3600.0  # seconds after which a temporary file belongs to a process that died


class DiskStore:
    """KV in `folder`; several processes may use it at once.

    A payload is written under a temporary name, synced, renamed and only then indexed, in one transaction: a
    process that dies at any point leaves a valid store behind.

    Args:
        folder: made when missing.
        lock_timeout: seconds to wait for another process's transaction.
        clock: seconds since the epoch, for `created` and for clearing stale temporary files.

    Raises:
        StoreReadOnlyError, StoreLockedError, StoreFullError, StoreFormatError: it cannot be opened.
    """

    def __init__(
        self, folder: Path, *, lock_timeout: float = 30.0, clock: Callable[[], float] = time.time
    ) -> None:
        self.folder = folder.expanduser()
        self._clock = clock
        self._segments = self.folder / "segments"
        self._temporary = self.folder / "tmp"
        self._quarantine = self.folder / "quarantine"
        with self._translated_errors():
            for path in (self._segments, self._temporary):
                path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._temporary) as probe:
                probe.write(b"rolling_kv")
            self._clear_stale_temporaries()
            with FileLock(self.folder / "open.lock", timeout=lock_timeout):
                self._index = StoreIndex(self.folder / "index.sqlite", lock_timeout=lock_timeout)

    def claim(self, namespace: str, identity: ModelIdentity) -> None:
        with self._translated_errors():
            self._index.claim(namespace, identity)

    def get(self, lineage: Lineage) -> SegmentKV | None:
        with self._translated_errors():
            row = self._index.find(lineage.key)
            if row is None:
                return None
            path = self._path(lineage.key)
            try:
                return read_payload(path, lineage=lineage, checksum=row["checksum"])
            except CorruptPayloadError as error:
                place = self._set_aside(path)
                self._index.remove(lineage.key)
                raise CorruptPayloadError(f"{error}; {place}") from error

    def put(self, lineage: Lineage, kv: SegmentKV) -> None:
        with self._translated_errors():
            if self._index.find(lineage.key) is not None:
                return
            path = self._path(lineage.key)
            path.parent.mkdir(exist_ok=True)
            checksum = write_payload(path, self._temporary, lineage=lineage, kv=kv)
            size = path.stat().st_size
            self._index.add(lineage, checksum=checksum, size=size, created=self._clock())

    def get_anchors(self, lineage: Lineage, kind: str) -> tuple[int, ...] | None:
        with self._translated_errors():
            return self._index.find_anchors(lineage.key, kind)

    def put_anchors(self, lineage: Lineage, kind: str, tokens: tuple[int, ...]) -> None:
        with self._translated_errors():
            self._index.add_anchors(lineage.key, kind, tokens)

    def __len__(self) -> int:
        with self._translated_errors():
            return len(self._index)

    def check_integrity(self) -> list[str]:
        problems: list[str] = []
        with self._translated_errors():
            indexed = {row["key"]: row for row in self._index.rows()}
            for key, row in indexed.items():
                path = self._path(key)
                missing = f"{path.name} is indexed and missing"
                problem = verify_file(path, checksum=row["checksum"]) if path.exists() else missing
                if problem is not None:
                    problems.append(problem)
        return problems

    def close(self) -> None:
        self._index.close()

    def _path(self, key: str) -> Path:
        return self._segments / key[:2] / f"{key}.safetensors"

    def _set_aside(self, path: Path) -> str:
        if not path.exists():
            return "the file is missing"
        self._quarantine.mkdir(exist_ok=True)
        place = self._quarantine / path.name
        os.replace(path, place)
        return f"quarantined as {place}"

    def _clear_stale_temporaries(self) -> None:
        for path in self._temporary.iterdir():
            try:
                if self._clock() - path.stat().st_mtime > _STALE_TEMPORARY:
                    path.unlink()
            except FileNotFoundError:
                continue  # another process cleared it

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except Timeout as error:
            raise self._locked("its opening lock") from error
        except OSError as error:
            raise self._from_os_error(error) from error
        except sqlite3.Error as error:
            raise self._from_sqlite_error(error) from error

    def _locked(self, what: str) -> StoreLockedError:
        return StoreLockedError(
            f"Another process holds the index of the store in {self.folder} ({what}). "
            "Wait for it, end it, or pass another store= folder."
        )

    def _from_os_error(self, error: OSError) -> StoreError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StoreFullError(
                f"No space is left for the store in {self.folder}. What it holds is unharmed. "
                "Free some space, or pass store= a folder on a larger disk."
            )
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return StoreReadOnlyError(
                f"The store folder {self.folder} cannot be written ({error.strerror}). "
                "Pass store= a folder you may write to, or store=None to keep KV in memory."
            )
        if error.errno in (errno.EEXIST, errno.ENOTDIR):
            return StoreFormatError(
                f"{self.folder} is not a folder. Pass store= a folder; it is made when missing."
            )
        return StoreError(
            f"The store in {self.folder} failed: {error}. What it holds is unharmed; try again."
        )

    def _from_sqlite_error(self, error: sqlite3.Error) -> StoreError:
        text = str(error)
        if "locked" in text or "busy" in text:
            return self._locked(text)
        if "readonly" in text or "unable to open" in text:
            return StoreReadOnlyError(
                f"The index of the store in {self.folder} cannot be written ({text}). "
                "Pass store= a folder you may write to, or store=None to keep KV in memory."
            )
        if "full" in text:
            return StoreFullError(
                f"No space is left for the index of the store in {self.folder}. Free some space."
            )
        if "not a database" in text or "malformed" in text:
            return StoreFormatError(
                f"The index of the store in {self.folder} is damaged ({text}). "
                "Move index.sqlite away; KV is computed and indexed again as it is needed."
            )
        return StoreError(f"The index of the store in {self.folder} failed: {text}.")
