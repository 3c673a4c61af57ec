"""Compiles kernels as they are launched, for GPUs that are not there, and reads what they need.

Launches are recorded from the real functions, called with tensors without data, so what is compiled is what
would run: the same constants, argument types and known divisibilities.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_MODULES = [
    import_module(f"rolling_kv.engine.kernels.triton_{name}")
    for name in ("attention", "deviation", "mass", "remap", "scatter", "spans")
]
_TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
}

TARGETS = {
    "cuda:80": GPUTarget("cuda", 80, 32),
    "cuda:90": GPUTarget("cuda", 90, 32),
    "hip:gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel and what it was launched with."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a compiled kernel needs: bytes of shared memory a block, registers a thread, and bytes of spilled
    registers a thread."""

    kernel: str
    target: str
    shared: int
    registers: int
    spilled: int


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Launches inside are noted down and not run."""
    launches: list[Launch] = []

    def record(
        kernel: Any, grid: tuple[int, ...], *args: Any, warps: int = 4, stages: int = 2, **constants: Any
    ) -> None:
        named = dict(zip(kernel.arg_names, args, strict=False))
        launches.append(Launch(kernel, named | constants, {"num_warps": warps, "num_stages": stages}))

    originals: list[Callable[..., None]] = [module.launch for module in _MODULES]
    for module in _MODULES:
        module.launch = record  # type: ignore[attr-defined]
    try:
        yield launches
    finally:
        for module, original in zip(_MODULES, originals, strict=True):
            module.launch = original  # type: ignore[attr-defined]


def compiled(launch: Launch, target: str) -> Needs:
    """Compiles a launch for a target."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        fixed = parameter.is_constexpr or value is None
        if not fixed and not parameter.do_not_specialize and isinstance(value, int) and value == 1:
            fixed = True
        if fixed:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        signature[parameter.name] = _type(value)
        divisible = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        if divisible and not parameter.do_not_specialize:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    options = launch.options | {"enable_fp_fusion": True}
    binary = triton.compile(source, target=TARGETS[target], options=options)
    registers, spilled = _cuda(binary.asm["cubin"]) if "cubin" in binary.asm else _hip(binary.asm["amdgcn"])
    return Needs(launch.kernel.__name__, target, binary.metadata.shared, registers, spilled)


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"


def _cuda(cubin: bytes) -> tuple[int, int]:
    """Registers and stack of a cubin, by the cuobjdump that comes with triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert found, report
    return int(found[1]), int(found[2])


def _hip(assembly: str) -> tuple[int, int]:
    """Vector registers and scratch memory of an amdgcn kernel, from its own metadata."""
    registers = re.search(r"\.vgpr_count:\s+(\d+)", assembly)
    scratch = re.search(r"\.private_segment_fixed_size:\s+(\d+)", assembly)
    assert registers, assembly[-2000:]
    assert scratch, assembly[-2000:]
    return int(registers[1]), int(scratch[1])
