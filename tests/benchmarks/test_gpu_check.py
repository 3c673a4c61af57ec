"""`scripts/gpu-check` runs: on a CPU in Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
ABSENT = ("pydantic", "sqlite_utils", "platformdirs", "gguf")
"""What a machine with torch, triton and transformers need not have."""


def gpu_check(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    for name in ABSENT:
        (hidden / f"{name}.py").write_text(f"raise ModuleNotFoundError('{name} is hidden')\n")
    out = tmp_path / "report.json"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHON": sys.executable, "PYTHONPATH": str(hidden)}
    command = [str(ROOT / "scripts" / "gpu-check"), "--out", str(out), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(out.read_text())
    assert report == json.loads(done.stdout)
    assert report["figures"] in done.stderr
    return report


@pytest.mark.skipif(sys.platform != "linux", reason="triton exists for Linux alone")
def test_it_runs_in_the_interpreter_and_says_that_its_figures_mean_nothing(tmp_path: Path) -> None:
    report = gpu_check(tmp_path, "--interpret")
    assert report["figures"].startswith("NOT GPU FIGURES")
    checks = [*report["checks"], *report["ttft"]["checks"]]
    assert report["passed"] == all(check["passed"] for check in checks) is True
    for computation in ("attention", "mass", "peak", "remap", "scatter", "deviation", "span sums", "logits"):
        assert any(computation in check["check"] for check in checks), computation
    timed = {entry["kernel"] for entry in report["kernels"]["timed"]}
    assert timed >= {"attention", "torch attention with a mask", "dense flash attention", "remap", "mass"}
    policies = {entry["policy"] for entry in report["ttft"]["timed"]}
    assert policies == {"full-prefill", "document-aligned"}


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, "-m", "benchmarks.gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "There is no GPU. With --interpret" in done.stderr


@pytest.mark.gpu
def test_it_passes_on_a_gpu(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    assert gpu_check(tmp_path)["passed"]
