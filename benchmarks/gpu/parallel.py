"""The checks of each head size and dtype in a process of their own: compiling takes most of the time."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from typing import Any

import torch

from benchmarks.gpu.engine_alone import import_engine_alone
from benchmarks.gpu.scale import Scale


def run_checks(scale: Scale) -> list[dict[str, Any]]:
    """See `checks.run`; the results of all head sizes and dtypes."""
    with ProcessPoolExecutor(len(scale.check_types), multiprocessing.get_context("spawn")) as pool:
        return [check for found in pool.map(_check, repeat(scale), scale.check_types) for check in found]


def _check(scale: Scale, kind: tuple[int, torch.dtype]) -> list[dict[str, Any]]:
    import_engine_alone()
    from benchmarks.gpu.checks import run

    return run(scale, head_dim=kind[0], dtype=kind[1])
