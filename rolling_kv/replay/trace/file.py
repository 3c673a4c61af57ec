"""The file of a trace: one writer at a time, whole lines, and files that are renamed or cut under it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from filelock import FileLock, Timeout

from rolling_kv.errors import TraceError, TraceFormatError, TraceInUseError
from rolling_kv.replay.trace.lines import FORMAT, VERSION

_MOST = 1 << 20  # bytes of a first line that are looked at


class TraceFile:
    """Appends lines to a file. It is made when missing; a last line that a kill cut off is trimmed.

    Args:
        path: beside it `<path>.lock` keeps a second writer out.

    Raises:
        TraceInUseError: another session, in this process or another, records to it.
        TraceFormatError: it holds something else. TraceError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = FileLock(f"{path}.lock")
        self._file: int | None = None
        self._size = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise TraceInUseError(
                f"Another session records to {path}. Close it, or give this one a trace of its own."
            ) from error
        except OSError as error:
            raise TraceError(f"{path} cannot be written: {error.strerror}. Give another trace=.") from error
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Brings everything to the disk, and lets another session record. Closing twice is harmless.

        Raises:
            TraceError: the disk did not take it.
        """
        file, self._file = self._file, None
        try:
            if file is not None:
                try:
                    os.fsync(file)
                finally:
                    os.close(file)
        except OSError as error:
            raise TraceError(
                f"{self.path} could not be brought to the disk: {error.strerror}. Its end may be missing."
            ) from error
        finally:
            self._lock.release()

    def replaced(self) -> bool:
        """Whether the file is another one than before, and open now: it was renamed, removed or cut short.

        Raises:
            TraceFormatError: something else stands in its place. TraceError: it cannot be opened.
        """
        if self._file is not None:
            ours = os.fstat(self._file)
            try:
                there = os.stat(self.path)
            except FileNotFoundError:
                there = None
            same = there is not None and (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)
            if same and there is not None and there.st_size >= self._size:
                return False
            os.close(self._file)
            self._file = None
        self._open()
        return True

    def write(self, data: bytes) -> None:
        """Appends whole lines.

        Raises:
            TraceError: they could not be written; what there was is still whole.
        """
        assert self._file is not None
        before = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, data)
            if written < len(data):
                raise OSError(28, "No space left on device")
        except OSError as error:
            os.ftruncate(self._file, before)
            raise TraceError(
                f"{self.path} cannot be written: {error.strerror}. The call was not recorded; make room, or "
                "open a session without trace=."
            ) from error
        self._size = before + len(data)

    def _open(self) -> None:
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                self._size = self._trimmed(file)
            except BaseException:  # nothing of ours goes into what is no trace
                os.close(file)
                raise
        except OSError as error:
            raise TraceError(
                f"{self.path} cannot be written: {error.strerror}. Give another trace=."
            ) from error
        self._file = file

    def _trimmed(self, file: int) -> int:
        """Takes off a line that was cut short, and returns the size."""
        size = os.fstat(file).st_size
        if size == 0:
            return 0
        self._require_trace(os.pread(file, _MOST, 0), size)
        end, tail = size, b""
        while end and b"\n" not in tail:
            start = max(0, end - _MOST)
            tail, end = os.pread(file, end - start, start), start
        whole = end + tail.rfind(b"\n") + 1
        if whole < size:
            os.ftruncate(file, whole)
        return whole

    def _require_trace(self, beginning: bytes, size: int) -> None:
        line, whole, _ = beginning.partition(b"\n")
        if not whole and size < _MOST and line.startswith(b'{"kind":"header"'):
            return  # its first line was cut short
        require_header(line, where=str(self.path))


def require_header(line: bytes, *, where: str) -> None:
    """Checks that `line` is the header of a trace of this version.

    Raises:
        TraceFormatError
    """
    try:
        values = json.loads(line)
        kind, version = values["format"], values["version"]
    except (ValueError, TypeError, KeyError):
        kind = version = None
    if kind != FORMAT:
        raise TraceFormatError(
            f"{where} is not a trace: its first line is no header. Give the file that trace= recorded to."
        )
    if version != VERSION:
        raise TraceFormatError(
            f"{where} is a trace of version {version!r}; this release reads and writes version {VERSION}. "
            "Use the release that recorded it, or record anew."
        )
