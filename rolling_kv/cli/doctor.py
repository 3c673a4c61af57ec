"""`rolling-kv doctor`: what is installed, what it runs on, and what to do about what is missing."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated, Literal

import typer
from packaging.requirements import Requirement
from rich.markup import escape
from rich.table import Table

from rolling_kv.cli.options import JsonOption
from rolling_kv.cli.output import print_json, results
from rolling_kv.errors import RollingKVError

Status = Literal["ok", "missing", "failed"]

_EXTRAS = {
    "langchain": "LangChain agents",
    "sglang": "servers",
    "bench": "measurements: bench, profile and replay",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `needed` says that rolling_kv does not run without it."""

    name: str
    status: Status
    detail: str
    needed: bool
    advice: str = ""


def doctor(
    store: Annotated[Path | None, typer.Option(help="Also check that this store folder can be used.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Checks the installation, the device and the demo models; exit code 1 when it cannot run."""
    findings = list(examine(store))
    broken = [finding for finding in findings if finding.needed and finding.status != "ok"]
    if as_json:
        print_json({"ok": not broken, "findings": [asdict(finding) for finding in findings]})
    else:
        results.print(_table(findings))
        results.print(
            "Ready." if not broken else f"Not ready: {', '.join(finding.name for finding in broken)}."
        )
    if broken:
        raise typer.Exit(1)


def examine(store: Path | None) -> Iterator[Finding]:
    """Every check, in the order in which a reader wants them."""
    yield Finding(
        "python", "ok" if sys.version_info >= (3, 11) else "failed", platform.python_version(), True
    )
    yield from _requirements()
    if _installed("triton") is None:
        advice = "comes with torch for GPUs; the torch kernels run without it"
        yield Finding("triton", "missing", "not installed", False, advice)
    else:
        yield Finding("triton", "ok", _installed("triton") or "", False)
    yield from _guarded("device", _device)
    yield from _guarded("kernels", _kernels)
    yield from _demo_models()
    yield from _guarded("cache", lambda: _writable("cache", _cache()))
    if store is not None:
        yield from _guarded("store", lambda: _store(store))


def _requirements() -> Iterator[Finding]:
    """What the installed distribution declares: the packages that it needs, and those of its extras."""
    try:
        declared = [Requirement(text) for text in requires("rolling-kv") or []]
    except PackageNotFoundError:
        yield Finding("rolling-kv", "missing", "not installed", True, "pip install rolling-kv")
        return
    for requirement in declared:
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield _package(requirement, needed=True, advice=f"pip install '{_bare(requirement)}'")
    for extra, use in _EXTRAS.items():
        for requirement in declared:
            marker = requirement.marker
            if (
                marker is not None
                and not marker.evaluate({"extra": ""})
                and marker.evaluate({"extra": extra})
            ):
                advice = f"only for {use}: pip install 'rolling-kv[{extra}]'"
                yield _package(requirement, needed=False, advice=advice)


def _package(requirement: Requirement, *, needed: bool, advice: str) -> Finding:
    found = _installed(requirement.name)
    if found is None:
        return Finding(requirement.name, "missing", "not installed", needed, advice)
    if not requirement.specifier.contains(found, prereleases=True):
        return Finding(requirement.name, "failed", f"{found}, needs {requirement.specifier}", needed, advice)
    return Finding(requirement.name, "ok", found, needed)


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _bare(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"


def _guarded(name: str, check: Callable[[], Finding]) -> Iterator[Finding]:
    try:
        yield check()
    except (ImportError, OSError, RollingKVError) as error:
        yield Finding(name, "failed", str(error), True, "see the message")


def _device() -> Finding:
    import torch

    from rolling_kv.engine.models import choose_device, choose_dtype

    device = choose_device("auto")
    dtype = str(choose_dtype("auto", device=device)).removeprefix("torch.")
    if device.type == "cuda":
        return Finding("device", "ok", f"{torch.cuda.get_device_name(device)}, {dtype}", True)
    capability = torch.backends.cpu.get_cpu_capability()
    advice = "" if dtype == "bfloat16" else "this CPU has no fast bfloat16, so that dtype='auto' is float32"
    return Finding(
        "device", "ok", f"cpu ({capability}), {torch.get_num_threads()} threads, {dtype}", True, advice
    )


def _kernels() -> Finding:
    import torch

    from rolling_kv.engine.kernels.dispatch import implementation
    from rolling_kv.engine.models import choose_device

    return Finding("kernels", "ok", implementation(torch.empty(1, device=choose_device("auto"))), True)


def _demo_models() -> Iterator[Finding]:
    from rolling_kv.engine.demo_models import DEFAULT_DEMO_MODEL, DEMO_MODELS, demo_model_state

    for name, model in DEMO_MODELS.items():
        state = demo_model_state(name)
        label = f"model {name}" + (" (demo)" if name == DEFAULT_DEMO_MODEL else "")
        if state == "missing":
            yield Finding(label, "missing", "not installed", False, model.install_command)
        else:
            detail = "converted" if state == "converted" else "installed; converted at its first use"
            yield Finding(label, "ok", detail, False)


def _cache() -> Path:
    from rolling_kv.engine.demo_models import cache_root

    return cache_root()


def _writable(name: str, folder: Path) -> Finding:
    nearest = folder
    while not nearest.exists():
        nearest = nearest.parent
    with tempfile.TemporaryFile(dir=nearest):
        pass
    free = os.statvfs(nearest)
    return Finding(name, "ok", f"{folder}, {free.f_bavail * free.f_frsize / 1e9:.1f} GB free", True)


def _store(folder: Path) -> Finding:
    """Looks into a store and makes none: that is for the first session to do."""
    from rolling_kv.store.disk import DiskStore

    place = folder.expanduser()
    if place.exists() and not place.is_dir():
        return Finding("store", "failed", f"{folder} is not a folder", True, "pass --store a folder")
    room = _writable("store", place)
    if not (place / "index.sqlite").exists():
        if (place / "segments").exists():
            advice = "run `rolling-kv store rebuild` on the folder"
            return Finding("store", "failed", f"{folder} has KV and no index", True, advice)
        return replace(room, detail=f"{room.detail}; no store yet")
    store = DiskStore(place, read_only=True)
    try:
        problems = store.check_integrity()
        if problems:
            advice = "damaged KV is quarantined and computed again when it is needed"
            return Finding("store", "failed", "; ".join(problems[:3]), True, advice)
        return replace(room, detail=f"{room.detail}; {len(store)} segments, all whole")
    finally:
        store.close()


def _table(findings: list[Finding]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("", "status", "", "what to do"):
        table.add_column(column, overflow="fold")
    colours = {"ok": "green", "missing": "yellow", "failed": "red"}
    for finding in findings:
        colour = "red" if finding.needed and finding.status != "ok" else colours[finding.status]
        table.add_row(
            finding.name,
            f"[{colour}]{finding.status}[/{colour}]",
            escape(finding.detail),
            escape(finding.advice),
        )
    return table
