"""`rolling-kv doctor`: what is installed, what it runs on, and what to do about what is missing."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape
from rich.table import Table

from rolling_kv.cli.options import JsonOption
from rolling_kv.cli.output import print_json, results
from rolling_kv.errors import RollingKVError

Status = Literal["ok", "missing", "failed"]


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
    for package in ("torch", "transformers", "safetensors", "pydantic", "sqlite-utils", "xxhash"):
        yield _package(package, needed=True, advice=f"pip install {package}")
    yield _package(
        "triton", needed=False, advice="comes with torch for GPUs; the torch kernels run without it"
    )
    yield _package(
        "langchain-core",
        needed=False,
        advice="only for LangChain agents: pip install 'rolling-kv[langchain]'",
    )
    yield _package("sglang", needed=False, advice="only for servers: pip install 'rolling-kv[sglang]'")
    yield from _guarded("device", _device)
    yield from _guarded("kernels", _kernels)
    yield from _demo_models()
    yield from _guarded("cache", lambda: _writable("cache", _cache()))
    if store is not None:
        yield from _guarded("store", lambda: _store(store))


def _package(name: str, *, needed: bool, advice: str) -> Finding:
    try:
        return Finding(name, "ok", version(name), needed)
    except PackageNotFoundError:
        return Finding(name, "missing", "not installed", needed, advice)


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
    from rolling_kv.store import open_store

    if not folder.expanduser().exists():
        return _writable("store", folder.expanduser())
    store = open_store(folder)
    try:
        problems = store.check_integrity()
        if problems:
            shown = "; ".join(problems[:3])
            return Finding(
                "store",
                "failed",
                shown,
                True,
                "damaged KV is quarantined and computed again when it is needed",
            )
        return Finding("store", "ok", f"{folder}, {len(store)} segments, all whole", True)
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
