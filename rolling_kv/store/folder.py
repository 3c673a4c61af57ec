"""Where things lie in a store's folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_STALE_TEMPORARY = 3600.0  # seconds after which a temporary file belongs to a process that died


@dataclass(frozen=True, slots=True)
class StoreFolder:
    """The files of a store, and what fails verification set aside from them."""

    root: Path

    @property
    def index(self) -> Path:
        return self.root / "index.sqlite"

    @property
    def segments(self) -> Path:
        return self.root / "segments"

    @property
    def temporary(self) -> Path:
        return self.root / "tmp"

    @property
    def quarantine(self) -> Path:
        return self.root / "quarantine"

    def path(self, key: str) -> Path:
        """Where the payload of that key lies."""
        return self.segments / key[:2] / f"{key}.safetensors"

    def payloads(self) -> list[Path]:
        """Every payload file, indexed or not."""
        return sorted(self.segments.glob("*/*.safetensors"))

    def leavings(self) -> Iterator[Path]:
        """Files outside the payloads that hold KV as well: quarantined ones, and unfinished writes."""
        for place in (self.quarantine, self.temporary):
            yield from sorted(path for path in place.glob("*") if path.is_file())

    def prepare(self, *, now: float) -> None:
        """Makes what is missing, sees that it can be written, and clears what dead processes left."""
        for path in (self.segments, self.temporary):
            path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.temporary) as probe:
            probe.write(b"rolling_kv")
        for path in self.temporary.iterdir():
            try:
                if now - path.stat().st_mtime > _STALE_TEMPORARY:
                    path.unlink()
            except FileNotFoundError:
                continue  # another process cleared it

    def set_aside(self, path: Path) -> str:
        """Moves a payload into quarantine, and says where it went."""
        self.quarantine.mkdir(exist_ok=True)
        place = self.quarantine / path.name
        try:
            os.replace(path, place)
        except FileNotFoundError:
            return "the file is missing"
        return f"quarantined as {place}"
