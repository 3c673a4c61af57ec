"""Runs the checks, the timings and the time to first token, and prints or writes one JSON document.

scripts/gpu-check --out results.json
scripts/gpu-check --interpret    # tiny shapes on a CPU, to see that it runs
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.engine_alone import import_engine_alone
from benchmarks.gpu.parallel import run_checks
from benchmarks.gpu.scale import GPU, INTERPRETER


def main() -> None:
    options = _options()
    import_engine_alone()
    if options.interpret and os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("--interpret needs TRITON_INTERPRET=1 in the environment; scripts/gpu-check sets it.")
    os.environ["ROLLING_KV_KERNELS"] = "triton"
    if not options.interpret and not torch.cuda.is_available():
        sys.exit("There is no GPU. With --interpret everything runs on the CPU, in tiny shapes.")
    from benchmarks.gpu import timings, ttft

    scale = INTERPRETER if options.interpret else GPU
    report: dict[str, Any] = {"figures": _figures(options.interpret), "machine": _machine()}
    started = time.perf_counter()
    for name, part in (("checks", run_checks), ("kernels", timings.run), ("ttft", ttft.run)):
        report[name] = part(scale)
        report.setdefault("seconds", {})[name] = round(time.perf_counter() - started, 1)
        print(f"{name}: {time.perf_counter() - started:.1f} s since the start", file=sys.stderr, flush=True)
    failed = [check for check in [*report["checks"], *report["ttft"]["checks"]] if not check["passed"]]
    report["passed"] = not failed
    text = json.dumps(report, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")
    print(f"{report['figures']}. {len(failed)} checks failed.", file=sys.stderr)
    for check in failed:
        print(f"failed: {check}", file=sys.stderr)
    sys.exit(bool(failed))


def _figures(interpreted: bool) -> str:
    if interpreted:
        return "NOT GPU FIGURES: tiny shapes in Triton's interpreter, on a CPU"
    return f"measured on one {torch.cuda.get_device_name()}"


def _machine() -> dict[str, str]:
    packages = {name: version(name) for name in ("torch", "triton", "transformers")}
    return packages | {"python": platform.python_version(), "system": platform.platform()}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/gpu-check", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    parser.add_argument("--interpret", action="store_true", help="tiny shapes on a CPU, to see that it runs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
