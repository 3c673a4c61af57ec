"""A store in a folder: payload files, an index, and a quarantine for what fails verification."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from rolling_kv.errors import ConfigError, CorruptPayloadError, StoreError, StoreReadOnlyError
from rolling_kv.kv import ModelIdentity, SegmentKV
from rolling_kv.store import forgetting
from rolling_kv.store.eviction import GcReport, surplus
from rolling_kv.store.failures import translated_errors
from rolling_kv.store.folder import StoreFolder
from rolling_kv.store.index import SegmentRow, StoreIndex
from rolling_kv.store.lineage import Lineage
from rolling_kv.store.payload import publish, read_header, read_payload, write_payload
from rolling_kv.store.rebuild import RebuildReport, rebuild

_READERS = 4  # threads at once; beside its checksum a payload takes steps that one thread at a time does


class DiskStore:
    """KV in `folder`; several processes may use it at once.

    A payload is written under a temporary name, synced, renamed and indexed, the last two in one transaction:
    a process that dies at any point leaves a valid store behind. What is removed goes in a transaction, too.

    Args:
        folder: made when missing, unless `read_only`.
        quota: bytes of payloads at most; the least recently used go first, and the one stored last stays
            even when it alone is larger. None: no bound.
        ttl: seconds after which a segment that was neither stored nor loaded is removed. None: never.
        read_only: nothing in the folder is changed, and it need not be writable; what is damaged stays.
        lock_timeout: seconds to wait for another process's transaction.
        clock: seconds since the epoch, for `created` and `used` and for clearing stale temporary files.

    Raises:
        ConfigError: `quota` or `ttl` is not positive.
        StoreReadOnlyError, StoreLockedError, StoreFullError, StoreFormatError: it cannot be opened.
    """

    def __init__(
        self,
        folder: Path,
        *,
        quota: int | None = None,
        ttl: float | None = None,
        read_only: bool = False,
        lock_timeout: float = 30.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        for name, bound in (("quota", quota), ("ttl", ttl)):
            if bound is not None and not bound > 0:
                raise ConfigError(f"{name} is {bound}; expected more than 0, or None for no bound.")
        self.folder = folder.expanduser()
        self._files = StoreFolder(self.folder)
        self._quota = quota
        self._ttl = ttl
        self._read_only = read_only
        self._clock = clock
        with translated_errors(self.folder):
            if read_only:
                self._index = StoreIndex(self._files.index, lock_timeout=lock_timeout, read_only=True)
                return
            self._files.prepare(now=clock())
            with FileLock(self.folder / "open.lock", timeout=lock_timeout):
                self._index = StoreIndex(self._files.index, lock_timeout=lock_timeout)
        try:
            if quota is not None or ttl is not None:
                self.gc(max_bytes=quota, max_age=ttl)
        except BaseException:
            self._index.close()
            raise

    def claim(self, namespace: str, identity: ModelIdentity) -> None:
        with translated_errors(self.folder):
            self._index.claim(namespace, identity)

    def get(self, lineage: Lineage) -> SegmentKV | None:
        (found,) = self.get_many([lineage])
        if isinstance(found, StoreError):
            raise found
        return found

    def get_many(self, lineages: Sequence[Lineage]) -> list[SegmentKV | StoreError | None]:
        """What the contract says; as many threads read and verify as torch has, `_READERS` at most."""
        try:
            with translated_errors(self.folder):
                rows = self._index.find_many(lineage.key for lineage in lineages)
        except StoreError as error:
            return [error] * len(lineages)
        found: list[SegmentKV | StoreError | None] = [None] * len(lineages)
        there = [
            (place, lineage, row)
            for place, lineage in enumerate(lineages)
            if (row := rows.get(lineage.key)) is not None and not self._expired(row)
        ]

        def load(share: list[tuple[int, Lineage, SegmentRow]]) -> None:
            for place, lineage, row in share:
                found[place] = self._load(lineage, row)

        threads = min(len(there), torch.get_num_threads(), _READERS)
        if threads < 2:
            load(there)
            return found
        # Each thread has a share of its own: taking them one by one loses to handovers what threads gain.
        with ThreadPoolExecutor(threads, thread_name_prefix="rolling_kv-load") as pool:
            list(pool.map(load, [there[first::threads] for first in range(threads)]))
        return found

    def put(self, lineage: Lineage, kv: SegmentKV) -> None:
        self._require_writable()
        with translated_errors(self.folder):
            row = self._index.find(lineage.key)
            if row is not None and not self._expired(row):
                return
            temporary, checksum = write_payload(self._files.temporary, lineage=lineage, kv=kv)
            try:
                self._add(lineage, temporary, checksum=checksum)
            finally:
                temporary.unlink(missing_ok=True)

    def stored_at(self, lineage: Lineage) -> float | None:
        with translated_errors(self.folder):
            row = self._index.find(lineage.key)
        return None if row is None else row.created

    def get_anchors(self, lineage: Lineage, kind: str) -> tuple[int, ...] | None:
        with translated_errors(self.folder):
            return self._index.find_anchors(lineage.key, kind)

    def put_anchors(self, lineage: Lineage, kind: str, tokens: tuple[int, ...]) -> None:
        with translated_errors(self.folder):
            self._index.add_anchors(lineage.key, kind, tokens)

    def forget(self, namespace: str, token_digest: str) -> int:
        self._require_writable()
        with translated_errors(self.folder):
            return forgetting.forget(self._files, self._index, namespace=namespace, token_digest=token_digest)

    def holds(self, token_digest: str) -> list[str]:
        with translated_errors(self.folder):
            return forgetting.holds(self._files, self._index, token_digest=token_digest)

    def __len__(self) -> int:
        with translated_errors(self.folder):
            return len(self._index)

    def check_integrity(self) -> list[str]:
        problems: list[str] = []
        with translated_errors(self.folder):
            for row in self._index.rows():
                path = self._files.path(row.key)
                try:
                    read_header(path, checksum=row.checksum)
                except FileNotFoundError:
                    if self._index.find(row.key) is not None:  # else another process has just removed it
                        problems.append(f"{path.name} is indexed and missing")
                except CorruptPayloadError as error:
                    problems.append(str(error))
                except OSError as error:
                    problems.append(f"{path.name} could not be read: {error}")
        return problems

    def gc(
        self, *, max_bytes: int | None = None, max_age: float | None = None, dry_run: bool = False
    ) -> GcReport:
        """Removes segments not used for `max_age`, and the least recently used ones above `max_bytes`.

        Args:
            max_age: seconds.
            dry_run: only says what would go.
        """
        with translated_errors(self.folder):
            report = self._surplus(max_bytes=max_bytes, max_age=max_age)
            if report.removed and not dry_run:
                self._require_writable()
                with self._index.writing():
                    report = self._surplus(max_bytes=max_bytes, max_age=max_age)
                    self._remove(report.removed)
        return report

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
        path = self._files.path(key)
        with translated_errors(self.folder):
            try:
                lineage: dict[str, Any] = read_header(path)["lineage"]
            except FileNotFoundError as error:
                raise CorruptPayloadError(f"{path.name} is indexed and missing") from error
        return lineage

    def rebuild(self, *, progress: Callable[[int, int], None] | None = None) -> RebuildReport:
        """Indexes every payload file again, from the files alone; damaged ones are quarantined.

        Args:
            progress: called with how many files are done, of how many.
        """
        self._require_writable()
        with translated_errors(self.folder):
            return rebuild(self._files, self._index, progress=progress)

    def close(self) -> None:
        self._index.close()

    def _load(self, lineage: Lineage, row: SegmentRow) -> SegmentKV | StoreError | None:
        try:
            with translated_errors(self.folder):
                try:
                    kv: SegmentKV | None = self._read(lineage, row)
                except (CorruptPayloadError, FileNotFoundError):
                    if self._read_only:
                        raise
                    kv = self._read_again(lineage)
                if kv is not None:
                    self._index.use(lineage.key, self._clock())
                return kv
        except StoreError as error:
            return error

    def _expired(self, row: SegmentRow) -> bool:
        return self._ttl is not None and self._clock() - row.used > self._ttl

    def _read(self, lineage: Lineage, row: SegmentRow) -> SegmentKV:
        path = self._files.path(lineage.key)
        try:
            return read_payload(path, lineage=lineage, checksum=row.checksum)
        except FileNotFoundError:
            raise
        except OSError as error:  # of the system, so it says nothing of the file
            raise StoreError(
                f"{path.name} of the store in {self.folder} could not be read ({error.strerror or error}) "
                "and was left as it is. Try again, or pass store=None to keep KV in memory."
            ) from error

    def _read_again(self, lineage: Lineage) -> SegmentKV | None:
        """Reads a payload that failed, now that nobody else writes: it may have been removed or put again.

        If it fails still, it is set aside.

        Raises:
            CorruptPayloadError: says where it is now.
        """
        with self._index.writing():
            row = self._index.find(lineage.key)
            if row is None:
                return None
            try:
                return self._read(lineage, row)
            except (CorruptPayloadError, FileNotFoundError) as error:
                path = self._files.path(lineage.key)
                what = path.name if isinstance(error, FileNotFoundError) else str(error)
                failure = CorruptPayloadError(f"{what}; {self._files.set_aside(path)}")
                self._index.remove(lineage.key)
        raise failure

    def _add(self, lineage: Lineage, temporary: Path, *, checksum: str) -> None:
        now = self._clock()
        row = SegmentRow(
            key=lineage.key,
            namespace=lineage.namespace,
            tokens=len(lineage.segment.token_ids),
            context_tokens=sum(len(step.token_ids) for step in lineage.path[:-1]),
            bytes=temporary.stat().st_size,
            checksum=checksum,
            created=now,
            used=now,
        )
        with self._index.writing():
            publish(temporary, self._files.path(lineage.key))
            self._index.add(row, digests=[step.digest for step in lineage.path])
            if self._quota is not None or self._ttl is not None:
                excess = self._surplus(max_bytes=self._quota, max_age=self._ttl, keep=lineage.key)
                self._remove(excess.removed)

    def _surplus(self, *, max_bytes: int | None, max_age: float | None, keep: str | None = None) -> GcReport:
        oldest = None if max_age is None else self._clock() - max_age
        count, held = self._index.totals()
        removed = surplus(self._index.by_use(), held=held, max_bytes=max_bytes, oldest_use=oldest, keep=keep)
        freed = sum(row.bytes for row in removed)
        return GcReport(removed=tuple(removed), kept=count - len(removed), kept_bytes=held - freed)

    def _remove(self, rows: Sequence[SegmentRow]) -> None:
        for row in rows:
            self._files.path(row.key).unlink(missing_ok=True)
        self._index.remove(*(row.key for row in rows))

    def _require_writable(self) -> None:
        if self._read_only:
            raise StoreReadOnlyError(
                f"The store in {self.folder} was opened to be read. Open it without read_only."
            )
