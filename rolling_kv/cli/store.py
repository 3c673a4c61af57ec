"""`rolling-kv store`: what a store folder holds, whether it is whole, and its index anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from rolling_kv.cli.options import JsonOption
from rolling_kv.cli.output import print_json, progress_bar, results
from rolling_kv.errors import ConfigError
from rolling_kv.store.disk import DiskStore

FolderArgument = Annotated[Path, typer.Argument(help="The store's folder.")]

app = typer.Typer(help="Looks into a store folder: ls, stats, verify, rebuild.", no_args_is_help=True)


@app.command("ls")
def list_segments(
    folder: FolderArgument,
    namespace: Annotated[str | None, typer.Option(help="Only of this namespace.")] = None,
    long: Annotated[bool, typer.Option("--long", help="Also what each segment was computed from.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Lists the stored segments, oldest first."""
    with _opened(folder) as store:
        rows = [asdict(row) for row in store.rows() if namespace in (None, row.namespace)]
        if long:
            for row in rows:
                row["provenance"] = store.provenance(row["key"])
    if as_json:
        print_json({"segments": rows})
        return
    table = _table(
        "segment", "namespace", "tokens", "after", "KiB", "stored", *(["computed from"] if long else [])
    )
    for row in rows:
        stored = datetime.fromtimestamp(row["created"], tz=UTC).isoformat(sep=" ", timespec="seconds")[:19]
        figures = (str(row["tokens"]), str(row["context_tokens"]), f"{row['bytes'] / 1024:.0f}")
        origin = [_provenance(row["provenance"])] if long else []
        table.add_row(row["key"][:12], row["namespace"], *figures, stored, *origin)
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
        table.add_row(name, models[name].name, models[name].dtype, *figures)
    results.print(table)


@app.command()
def verify(folder: FolderArgument, as_json: JsonOption = False) -> None:
    """Reads every payload and compares it with the index. Exit code 1 when one is damaged or missing."""
    with _opened(folder) as store:
        count, problems = len(store), store.check_integrity()
    if as_json:
        print_json({"segments": count, "problems": problems})
    else:
        for problem in problems:
            results.print(problem, markup=False, highlight=False)
        results.print(f"{count} segments, {len(problems) or 'no'} damaged.")
        if problems:
            results.print(
                "Damaged KV is quarantined and computed again when it is needed; or run store rebuild."
            )
    if problems:
        raise typer.Exit(1)


@app.command()
def rebuild(folder: FolderArgument, as_json: JsonOption = False) -> None:
    """Makes the index anew from the payload files; damaged files are quarantined."""
    with _opened(folder, empty_is_fine=True) as store, progress_bar() as progress:
        report = store.rebuild(progress=lambda done, total: progress("indexing", done / max(total, 1)))
    if as_json:
        print_json(asdict(report))
        return
    for problem in report.damaged:
        results.print(problem, markup=False, highlight=False)
    results.print(
        f"{report.indexed} segments indexed, {len(report.damaged)} damaged, {len(report.missing)} missing."
    )


@contextmanager
def _opened(folder: Path, *, empty_is_fine: bool = False) -> Iterator[DiskStore]:
    """The store in `folder`, which must be one: looking into a store does not make one."""
    place = folder.expanduser()
    marker = place / ("segments" if empty_is_fine else "index.sqlite")
    if not marker.exists():
        raise ConfigError(
            f"{folder} holds no store ({marker.name} is missing). Give the folder passed as store=."
        )
    store = DiskStore(place)
    try:
        yield store
    finally:
        store.close()


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _provenance(lineage: dict[str, Any]) -> str:
    steps = " + ".join(str(length) for _, length, _ in lineage["path"])
    return f"{lineage['name']} {lineage['dtype']} {lineage['device']}: {steps} tokens"
