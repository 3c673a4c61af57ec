"""Making a store's index anew from its payload files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from rolling_kv.errors import CorruptPayloadError
from rolling_kv.kv import ModelIdentity
from rolling_kv.store.folder import StoreFolder
from rolling_kv.store.index import SegmentRow, StoreIndex
from rolling_kv.store.payload import read_header


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """What rebuilding an index did: files indexed, keys whose file was gone, files that were damaged."""

    indexed: int
    missing: tuple[str, ...]
    damaged: tuple[str, ...]


def rebuild(
    folder: StoreFolder, index: StoreIndex, *, progress: Callable[[int, int], None] | None = None
) -> RebuildReport:
    """Indexes every payload file again; damaged ones are quarantined. Others may use the store meanwhile."""
    report = progress or (lambda done, total: None)
    known = index.keys()  # before the files: what is stored from here on is no missing file
    paths = folder.payloads()
    missing = [
        key for key in sorted(known - {path.stem for path in paths}) if _forget_missing(folder, index, key)
    ]
    indexed = 0
    damaged = []
    for done, path in enumerate(paths):
        report(done, len(paths))
        with index.writing():  # so that nobody replaces or removes the file before it is indexed or set aside
            try:
                _index_file(index, path)
                indexed += 1
            except FileNotFoundError:
                continue  # another process removed it
            except CorruptPayloadError as error:
                damaged.append(f"{error}; {folder.set_aside(path)}")
                index.remove(path.stem)
    report(len(paths), len(paths))
    return RebuildReport(indexed=indexed, missing=tuple(missing), damaged=tuple(damaged))


def _forget_missing(folder: StoreFolder, index: StoreIndex, key: str) -> bool:
    with index.writing():
        missing = not folder.path(key).exists()
        if missing:
            index.remove(key)
    return missing


def _index_file(index: StoreIndex, path: Path) -> None:
    header = read_header(path)
    lineage = header["lineage"]
    parts = {field.name: lineage[field.name] for field in fields(ModelIdentity) if field.name != "name"}
    index.claim(lineage["namespace"], ModelIdentity(name="", **parts))
    *before, (_, length, _) = lineage["path"]
    status = path.stat()
    known = index.find(path.stem)
    row = SegmentRow(
        key=path.stem,
        namespace=lineage["namespace"],
        tokens=length,
        context_tokens=sum(tokens for _, tokens, _ in before),
        bytes=status.st_size,
        checksum=header["checksum"],
        created=status.st_mtime if known is None else known.created,
        used=status.st_mtime if known is None else known.used,
    )
    index.add(row, digests=[digest for _, _, digest in lineage["path"]])
