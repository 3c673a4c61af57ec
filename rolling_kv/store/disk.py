"""A store in a folder: payload files, an index, and a quarantine for what fails verification."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from filelock import FileLock

from rolling_kv.errors import CorruptPayloadError
from rolling_kv.kv import ModelIdentity, SegmentKV
from rolling_kv.store.failures import translated_errors
from rolling_kv.store.index import SegmentRow, StoreIndex
from rolling_kv.store.lineage import Lineage
from rolling_kv.store.payload import (
    file_checksum,
    read_header,
    read_payload,
    verify_file,
    write_payload,
)

_STALE_TEMPORARY = 3600.0  # seconds after which a temporary file belongs to a process that died


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """What rebuilding an index did: files indexed, keys whose file was gone, files that were damaged."""

    indexed: int
    missing: tuple[str, ...]
    damaged: tuple[str, ...]


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
        with translated_errors(self.folder):
            for path in (self._segments, self._temporary):
                path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._temporary) as probe:
                probe.write(b"rolling_kv")
            self._clear_stale_temporaries()
            with FileLock(self.folder / "open.lock", timeout=lock_timeout):
                self._index = StoreIndex(self.folder / "index.sqlite", lock_timeout=lock_timeout)

    def claim(self, namespace: str, identity: ModelIdentity) -> None:
        with translated_errors(self.folder):
            self._index.claim(namespace, identity)

    def get(self, lineage: Lineage) -> SegmentKV | None:
        with translated_errors(self.folder):
            row = self._index.find(lineage.key)
            if row is None:
                return None
            path = self._path(lineage.key)
            try:
                return read_payload(path, lineage=lineage, checksum=row.checksum)
            except CorruptPayloadError as error:
                place = self._set_aside(path)
                self._index.remove(lineage.key)
                raise CorruptPayloadError(f"{error}; {place}") from error

    def put(self, lineage: Lineage, kv: SegmentKV) -> None:
        with translated_errors(self.folder):
            if self._index.find(lineage.key) is not None:
                return
            path = self._path(lineage.key)
            path.parent.mkdir(exist_ok=True)
            checksum = write_payload(path, self._temporary, lineage=lineage, kv=kv)
            size = path.stat().st_size
            self._index.add(
                SegmentRow(
                    key=lineage.key,
                    namespace=lineage.namespace,
                    tokens=len(lineage.segment.token_ids),
                    context_tokens=lineage.segment.start,
                    bytes=size,
                    checksum=checksum,
                    created=self._clock(),
                )
            )

    def get_anchors(self, lineage: Lineage, kind: str) -> tuple[int, ...] | None:
        with translated_errors(self.folder):
            return self._index.find_anchors(lineage.key, kind)

    def put_anchors(self, lineage: Lineage, kind: str, tokens: tuple[int, ...]) -> None:
        with translated_errors(self.folder):
            self._index.add_anchors(lineage.key, kind, tokens)

    def __len__(self) -> int:
        with translated_errors(self.folder):
            return len(self._index)

    def check_integrity(self) -> list[str]:
        problems: list[str] = []
        with translated_errors(self.folder):
            for row in self._index.rows():
                path = self._path(row.key)
                missing = f"{path.name} is indexed and missing"
                problem = verify_file(path, checksum=row.checksum) if path.exists() else missing
                if problem is not None:
                    problems.append(problem)
        return problems

    def rows(self) -> list[SegmentRow]:
        """What the index knows of every segment."""
        with translated_errors(self.folder):
            return self._index.rows()

    def namespaces(self) -> dict[str, ModelIdentity]:
        """Which model each namespace belongs to."""
        with translated_errors(self.folder):
            return self._index.namespaces()

    def provenance(self, key: str) -> dict[str, Any]:
        """What a stored segment was computed from, as its payload says.

        Raises:
            CorruptPayloadError: the payload is damaged or missing.
        """
        lineage: dict[str, Any] = read_header(self._path(key))["lineage"]
        return lineage

    def rebuild(self, *, progress: Callable[[int, int], None] | None = None) -> RebuildReport:
        """Indexes every payload file again, from the files alone; damaged ones are quarantined.

        Args:
            progress: called with how many files are done, of how many.
        """
        with translated_errors(self.folder):
            paths = sorted(self._segments.glob("*/*.safetensors"))
            known = {row.key for row in self._index.rows()}
            missing = sorted(known - {path.stem for path in paths})
            for key in missing:
                self._index.remove(key)
            damaged = []
            for done, path in enumerate(paths):
                if progress is not None:
                    progress(done, len(paths))
                try:
                    self._index_file(path)
                except CorruptPayloadError as error:
                    self._index.remove(path.stem)
                    damaged.append(f"{error}; {self._set_aside(path)}")
            if progress is not None:
                progress(len(paths), len(paths))
        return RebuildReport(
            indexed=len(paths) - len(damaged), missing=tuple(missing), damaged=tuple(damaged)
        )

    def _index_file(self, path: Path) -> None:
        lineage = read_header(path)["lineage"]
        steps = lineage["path"]
        identity = ModelIdentity(**{field.name: lineage[field.name] for field in fields(ModelIdentity)})
        self._index.claim(lineage["namespace"], identity)
        self._index.add(
            SegmentRow(
                key=path.stem,
                namespace=lineage["namespace"],
                tokens=steps[-1][1],
                context_tokens=steps[-1][0],
                bytes=path.stat().st_size,
                checksum=file_checksum(path),
                created=path.stat().st_mtime,
            )
        )

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
