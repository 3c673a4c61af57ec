"""Which implementation a computation runs on: the Triton kernels on a GPU that they fit, else torch.

The environment variable ROLLING_KV_KERNELS forces one, `torch` or `triton`. Kernels run on a CPU only when
they are forced, in Triton's interpreter (TRITON_INTERPRET=1), which is for tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Literal, ParamSpec, TypeVar, cast

import torch

from rolling_kv.engine.kernels import (
    torch_attention,
    torch_deviation,
    torch_mass,
    torch_remap,
    torch_scatter,
    torch_spans,
)
from rolling_kv.errors import ConfigError

Implementation = Literal["torch", "triton"]
P = ParamSpec("P")
R = TypeVar("R")

_VARIABLE = "ROLLING_KV_KERNELS"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_HEAD_DIM = 256


def implementation(tensor: torch.Tensor) -> Implementation:
    """What runs on `tensor`, a computation's first argument: [..., head_dim], or scores [tokens].

    Raises:
        ConfigError: ROLLING_KV_KERNELS names no implementation, or forces one that cannot run.
    """
    asked = os.environ.get(_VARIABLE, "")
    if asked not in ("", "torch", "triton"):
        raise ConfigError(
            f"{_VARIABLE} is {asked!r}; expected 'torch' or 'triton'. Unset it to let the device decide."
        )
    if asked == "torch" or (not asked and tensor.device.type != "cuda"):
        return "torch"
    obstacle = _obstacle(tensor)
    if asked and obstacle:
        raise ConfigError(f"{_VARIABLE} is 'triton', but {obstacle}. Unset it to let the device decide.")
    return "torch" if obstacle else "triton"


def _obstacle(tensor: torch.Tensor) -> str | None:
    """Why the Triton kernels cannot run on `tensor`; triton is not imported to find that out."""
    if not _installed():
        return "triton is not installed (pip install triton)"
    device, dtype = tensor.device.type, tensor.dtype
    if device != "cuda" and not (device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return f"on {device} its kernels do not run (on cpu they do with TRITON_INTERPRET=1, for tests)"
    if dtype not in _DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in _DTYPES)
        return f"its kernels take {names} and not {str(dtype).removeprefix('torch.')}"
    if tensor.dim() > 1 and tensor.shape[-1] > _MAX_HEAD_DIM:
        return f"its kernels take heads of at most {_MAX_HEAD_DIM} dimensions and not {tensor.shape[-1]}"
    return None


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


def _dispatched(reference: Callable[P, R]) -> Callable[P, R]:
    """The computation of a torch reference, on what fits its first argument."""

    @cache
    def kernel() -> Callable[P, R]:
        module = import_module(reference.__module__.replace(".torch_", ".triton_"))
        return cast(Callable[P, R], getattr(module, reference.__name__))

    @wraps(reference)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        chosen = implementation(cast(torch.Tensor, args[0]))
        return (reference if chosen == "torch" else kernel())(*args, **kwargs)

    return run


attention_mass = _dispatched(torch_mass.attention_mass)
attention_peak = _dispatched(torch_mass.attention_peak)
key_deviation = _dispatched(torch_deviation.key_deviation)
remap_keys = _dispatched(torch_remap.remap_keys)
scatter_rows = _dispatched(torch_scatter.scatter_rows)
span_sums = _dispatched(torch_spans.span_sums)
sparse_row_attention = _dispatched(torch_attention.sparse_row_attention)
