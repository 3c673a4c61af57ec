"""`rolling-kv store`: what a store folder holds, whether it is whole, what can go, and its index anew."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from rolling_kv.cli.options import JsonOption
from rolling_kv.cli.output import print_json, progress_bar, results
from rolling_kv.cli.units import parse_age, parse_size
from rolling_kv.errors import ConfigError, CorruptPayloadError
from rolling_kv.store.disk import DiskStore

FolderArgument = Annotated[Path, typer.Argument(help="The store's folder.")]

app = typer.Typer(
    help="Looks into a store folder, and keeps it small: ls, stats, verify, gc, rebuild.",
    no_args_is_help=True,
)


@app.command("ls")
def list_segments(
    folder: FolderArgument,
    namespace: Annotated[str | None, typer.Option(help="Only of this namespace.")] = None,
    long: Annotated[bool, typer.Option("--long", help="Also what each segment was computed from.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Lists the stored segments by namespace, oldest first."""
    with _opened(folder) as store:
        rows = [asdict(row) for row in store.rows() if namespace in (None, row.namespace)]
        names = {name: identity.name for name, identity in store.namespaces().items()}
        if long:
            for row in rows:
                row |= _provenance(store, row["key"])
    if as_json:
        print_json({"segments": rows})
        return
    table = _table(
        "segment",
        "namespace",
        "tokens",
        "after",
        "KiB",
        "stored",
        "used",
        *(["computed from"] if long else []),
    )
    for row in rows:
        stored, used = (_moment(row[when]) for when in ("created", "used"))
        figures = (str(row["tokens"]), str(row["context_tokens"]), f"{row['bytes'] / 1024:.0f}")
        origin = [_computed_from(row, model=names.get(row["namespace"], ""))] if long else []
        table.add_row(row["key"][:12], escape(row["namespace"]), *figures, stored, used, *origin)
    results.print(table)


@app.command()
def stats(folder: FolderArgument, as_json: JsonOption = False) -> None:
    """Sums up what each namespace holds, and of which model."""
    with _opened(folder) as store:
        models = store.namespaces()
        rows = store.rows()
    sums: dict[str, dict[str, Any]] = {}
    for name, identity in models.items():
        own = [row for row in rows if row.namespace == name]
        sums[name] = {
            "model": asdict(identity),
            "segments": len(own),
            "tokens": sum(row.tokens for row in own),
            "bytes": sum(row.bytes for row in own),
        }
    if as_json:
        print_json({"namespaces": sums})
        return
    table = _table("namespace", "model", "dtype", "segments", "tokens", "MiB")
    for name, one in sums.items():
        figures = (str(one["segments"]), str(one["tokens"]), f"{one['bytes'] / 2**20:.1f}")
        table.add_row(escape(name), escape(models[name].name), models[name].dtype, *figures)
    results.print(table)


@app.command()
def verify(
    folder: FolderArgument,
    forgotten: Annotated[
        str | None,
        typer.Option(
            metavar="DIGEST",
            help="Also proves that nothing is left of a document that was evicted with forget=True; the "
            "change that evicted it holds the digest.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Reads every payload and compares it with the index. Exit code 1 when one is damaged or missing."""
    if forgotten is not None and not re.fullmatch("[0-9a-f]{32}", forgotten):
        raise ConfigError(f"--forgotten is {forgotten!r}; expected a digest of 32 hexadecimal digits.")
    with _opened(folder) as store:
        count, problems = len(store), store.check_integrity()
        left = [] if forgotten is None else store.holds(forgotten)
    problems += [f"{key} was computed from the forgotten document" for key in left]
    if as_json:
        print_json({"segments": count, "problems": problems, "forgotten": forgotten, "left_of_it": left})
    else:
        for problem in problems:
            results.print(problem, markup=False, highlight=False)
        if forgotten is not None and not left:
            results.print(f"Nothing is left of {forgotten}.", highlight=False)
        damaged = len(problems) - len(left)
        results.print(f"{count} segments, {damaged or 'no'} damaged.")
        if damaged:
            results.print(
                "Damaged KV is quarantined and computed again when it is needed; or run store rebuild."
            )
    if problems:
        raise typer.Exit(1)


@app.command()
def rebuild(folder: FolderArgument, as_json: JsonOption = False) -> None:
    """Makes the index anew from the payload files; damaged files are quarantined."""
    with _opened(folder, to_write=True, index_needed=False) as store, progress_bar() as progress:
        report = store.rebuild(progress=lambda done, total: progress("indexing", done / max(total, 1)))
    if as_json:
        print_json(asdict(report))
        return
    for problem in report.damaged:
        results.print(problem, markup=False, highlight=False)
    results.print(
        f"{report.indexed} segments indexed, {len(report.damaged)} damaged, {len(report.missing)} missing."
    )


@app.command("gc")
def collect(
    folder: FolderArgument,
    max_bytes: Annotated[
        str | None, typer.Option(help="Keep at most this much, the most recently used: 500MB, 2GiB.")
    ] = None,
    max_age: Annotated[
        str | None, typer.Option(help="Remove what was not used for this long: 90s, 30m, 12h, 7d, 2w.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Removes stored KV, the least recently used first. It is computed again when it is needed."""
    if max_bytes is None and max_age is None:
        raise ConfigError("There is no bound to keep to. Give --max-bytes, --max-age or both.")
    bounds = (
        None if max_bytes is None else parse_size(max_bytes),
        None if max_age is None else parse_age(max_age),
    )
    with _opened(folder, to_write=not dry_run) as store:
        report = store.gc(max_bytes=bounds[0], max_age=bounds[1], dry_run=dry_run)
    if as_json:
        removed = [asdict(row) for row in report.removed]
        sums = {"freed": report.freed, "kept": report.kept, "kept_bytes": report.kept_bytes}
        print_json({"dry_run": dry_run, "removed": removed, **sums})
        return
    verb = "would be removed" if dry_run else "removed"
    results.print(
        f"{len(report.removed)} segments {verb}, {report.freed / 2**20:.1f} MiB; "
        f"{report.kept} kept, {report.kept_bytes / 2**20:.1f} MiB.",
        highlight=False,
    )


@contextmanager
def _opened(folder: Path, *, to_write: bool = False, index_needed: bool = True) -> Iterator[DiskStore]:
    """The store in `folder`, which must be one: looking into a store does not make one."""
    place = folder.expanduser()
    marker = place / ("index.sqlite" if index_needed else "segments")
    if not marker.exists():
        raise ConfigError(
            f"{folder} holds no store ({marker.name} is missing). Give the folder passed as store=."
        )
    store = DiskStore(place, read_only=not to_write)
    try:
        yield store
    finally:
        store.close()


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M:%S")


def _provenance(store: DiskStore, key: str) -> dict[str, Any]:
    try:
        return {"provenance": store.provenance(key), "damage": None}
    except CorruptPayloadError as error:
        return {"provenance": None, "damage": str(error)}


def _computed_from(row: dict[str, Any], *, model: str) -> str:
    lineage = row["provenance"]
    if lineage is None:
        return "damaged"
    steps = " + ".join(str(length) for _, length, _ in lineage["path"])
    return escape(f"{model or lineage['model'][:12]} {lineage['dtype']} {lineage['device']}: {steps} tokens")
