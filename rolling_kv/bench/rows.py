"""Rows of a long run, one JSON object a line, so that a run can be stopped and go on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from filelock import FileLock, Timeout

from rolling_kv.errors import BenchError


class Rows:
    """Appends rows to a file and reads back what is whole. The first line holds the run's settings.

    A last line that was cut off is dropped. Rows of other settings are refused, and so is a second run on the
    same file at once. Use it as a context manager.

    Args:
        path: made when missing, its folder too.
        settings: what rows depend on; plain values.

    Raises:
        BenchError: the file is of another run, in use, or damaged.
    """

    def __init__(self, path: Path, *, settings: dict[str, Any]) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(f"{path}.lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise BenchError(
                f"{path} is in use by another run. Wait for it, or give another --out."
            ) from error
        try:
            self.rows = self._opened(json.loads(json.dumps(settings)))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets another run go on with the file."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(self, row: dict[str, Any]) -> None:
        """Keeps a row; it is on the disk when this returns."""
        self._write(row)
        self.rows.append(row)

    def _opened(self, settings: dict[str, Any]) -> list[dict[str, Any]]:
        lines = self._whole_lines()
        if not lines:
            self._write({"settings": settings})
            return []
        found = lines[0].get("settings")
        if found != settings:
            theirs = found if isinstance(found, dict) else {}
            changed = ", ".join(key for key in settings if theirs.get(key) != settings[key])
            raise BenchError(
                f"{self.path} holds a run with other settings ({changed or 'of another kind'}). Give another "
                "--out, or delete it to start anew."
            )
        return lines[1:]

    def _write(self, value: dict[str, Any]) -> None:
        with self.path.open("ab") as file:
            file.write(json.dumps(value, ensure_ascii=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _whole_lines(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        data = self.path.read_bytes()
        end = data.rfind(b"\n") + 1
        if end < len(data):
            with self.path.open("r+b") as file:
                file.truncate(end)
        try:
            return [json.loads(line) for line in data[:end].split(b"\n")[:-1]]
        except ValueError as error:
            raise BenchError(f"{self.path} is damaged: {error}. Delete it to start anew.") from error
