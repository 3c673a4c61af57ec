"""Rows of a long run, one JSON object a line, so that a run can be stopped and go on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rolling_kv.errors import BenchError


class Rows:
    """Appends rows to a file and reads back what is whole. The first line holds the run's settings.

    A last line that was cut off is dropped. Rows of other settings are refused.

    Args:
        path: made when missing, its folder too.
        settings: what rows depend on; plain values.

    Raises:
        BenchError: the file is of another run, or damaged.
    """

    def __init__(self, path: Path, *, settings: dict[str, Any]) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        wanted = json.loads(json.dumps(settings))
        lines = self._whole_lines()
        if lines:
            found = lines[0].get("settings")
            if found != wanted:
                theirs = found if isinstance(found, dict) else {}
                changed = ", ".join(key for key in wanted if theirs.get(key) != wanted[key])
                raise BenchError(
                    f"{path} holds a run with other settings ({changed or 'of another kind'}). Give another "
                    "--out, or delete it to start anew."
                )
        else:
            self._write({"settings": wanted})
        self.rows: list[dict[str, Any]] = lines[1:]

    def add(self, row: dict[str, Any]) -> None:
        """Keeps a row; it is on the disk when this returns."""
        self._write(row)
        self.rows.append(row)

    def _write(self, value: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(value, ensure_ascii=False) + "\n")
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
            return [json.loads(line) for line in data[:end].decode("utf-8").splitlines()]
        except ValueError as error:
            raise BenchError(f"{self.path} is damaged: {error}. Delete it to start anew.") from error
