"""Which implementation runs, and what is said when it cannot."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from rolling_kv.engine import kernels
from rolling_kv.engine.kernels import dispatch, span_sums
from rolling_kv.errors import ConfigError


@pytest.mark.parametrize("name", kernels.__all__)
def test_both_implementations_take_the_same_arguments(name: str) -> None:
    reference = inspect.unwrap(getattr(kernels, name))
    kernel = getattr(import_module(reference.__module__.replace(".torch_", ".triton_")), name)
    assert inspect.signature(kernel) == inspect.signature(reference)
    assert f"torch_{kernel.__module__.partition('triton_')[2]}.{name}" in kernel.__doc__


def test_every_computation_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "kernels.md").read_text(encoding="utf-8")
    for name in kernels.__all__:
        assert f"| `{name}` |" in page


def test_a_cpu_runs_torch_also_where_the_interpreter_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLING_KV_KERNELS", raising=False)
    assert dispatch.implementation(torch.zeros(3, 8)) == "torch"


@pytest.mark.parametrize("asked", ["torch", "triton"])
def test_either_can_be_forced(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLING_KV_KERNELS", asked)
    assert dispatch.implementation(torch.zeros(3, 8)) == asked


def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLING_KV_KERNELS", "cuda")
    with pytest.raises(ConfigError, match="'cuda'; expected 'torch' or 'triton'"):
        span_sums(torch.zeros(3), torch.tensor([0]), torch.tensor([3]))


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(3, 8, dtype=torch.float64), "bfloat16, float16, float32 and not float64"),
        (torch.zeros(3, 512), "at most 256 dimensions and not 512"),
        (torch.zeros(3, 8, device="meta"), "on meta its kernels do not run"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused_when_they_are_forced(
    tensor: torch.Tensor, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLING_KV_KERNELS", "triton")
    with pytest.raises(ConfigError, match=reason):
        dispatch.implementation(tensor)


def test_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLING_KV_KERNELS", "triton")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="on cpu its kernels do not run"):
        dispatch.implementation(torch.zeros(3, 8))


WITHOUT_TRITON = """
import importlib.abc, importlib.util, os, sys

class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(name, name=name)

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find_spec(name, *rest)
sys.meta_path.insert(0, Hide())
from rolling_kv.engine.host import TransformersHost
from rolling_kv.errors import ConfigError
from tests.tiny_models import tiny_model, tiny_tokenizer

host = TransformersHost(tiny_model("llama"), tiny_tokenizer(), name="tiny")
assert len(host.extend([], [1, 2, 3])) == 3
assert "triton" not in sys.modules
os.environ["ROLLING_KV_KERNELS"] = "triton"
try:
    host.extend([], [1, 2, 3])
except ConfigError as error:
    assert "triton is not installed" in str(error), error
else:
    raise AssertionError("nothing was raised")
"""


def test_everything_runs_without_triton() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_TRITON], check=True)
