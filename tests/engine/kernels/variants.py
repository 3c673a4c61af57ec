"""Every way in which the dispatch can launch a kernel: computations, head sizes, dtypes, terms.

python -m tests.engine.kernels.variants    # compiles all of them, and prints what they need
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

HEAD_SIZES = (64, 80, 96, 128, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TARGETS = ("cuda:80", "cuda:90", "hip:gfx942")


@dataclass(frozen=True, slots=True)
class Variant:
    """One call of a computation, on tensors without data.

    Args:
        subject: `attention`, `mass`, `rows` (remap, scatter, deviation) or `spans`.
        rows: of the query; one, or so many that they fill blocks.
        terms: with gaps in positions, a soft cap and sinks, or with an interleaved, partial, gathering remap.
    """

    subject: str
    head_dim: int
    dtype: torch.dtype
    rows: int = 400
    terms: bool = False

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.subject}, heads of {self.head_dim}, {dtype}, {self.rows} rows, terms: {self.terms}"


def every_variant() -> Iterator[Variant]:
    yield Variant("spans", 0, torch.float32)
    for head_dim, dtype, terms in product(HEAD_SIZES, DTYPES, (False, True)):
        yield Variant("rows", head_dim, dtype, terms=terms)
        for subject, rows in product(("attention", "mass"), (1, 400)):
            yield Variant(subject, head_dim, dtype, rows=rows, terms=terms)


def some_variants() -> Iterator[Variant]:
    """What every test run compiles: each kernel, each head size, each dtype, and the largest blocks."""
    yield Variant("spans", 0, torch.float32)
    yield Variant("rows", 80, torch.bfloat16)
    yield Variant("rows", 128, torch.float32, terms=True)
    yield Variant("attention", 64, torch.bfloat16, rows=1)
    yield Variant("attention", 96, torch.float16, terms=True)
    yield Variant("attention", 128, torch.bfloat16)
    yield Variant("attention", 256, torch.bfloat16, terms=True)
    yield Variant("attention", 256, torch.float32)
    yield Variant("mass", 80, torch.float32, rows=1, terms=True)
    yield Variant("mass", 128, torch.bfloat16)


def compile_for(variant: Variant, target: str) -> list[Any]:
    """What the kernels of a variant need on a target, `ahead_of_time.Needs`."""
    from tests.engine.kernels import ahead_of_time  # triton, without its interpreter

    with ahead_of_time.recorded() as launches:
        _CALLS[variant.subject](variant)
    return [ahead_of_time.compiled(launch, target) for launch in launches]


def compile_all(variants: Iterable[Variant]) -> list[tuple[Variant, list[Any]]]:
    """Every variant for every target, on all processors, in processes without the interpreter."""
    pairs = list(product(variants, TARGETS))
    interpreted = os.environ.pop("TRITON_INTERPRET", None)
    try:
        with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
            needs = list(pool.map(compile_for, *zip(*pairs, strict=True)))
    finally:
        if interpreted is not None:
            os.environ["TRITON_INTERPRET"] = interpreted
    return [(variant, found) for (variant, _), found in zip(pairs, needs, strict=True)]


def _empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _attention(variant: Variant) -> None:
    from rolling_kv.engine.kernels.triton_attention import sparse_row_attention

    query, key = _query_and_key(variant)
    sparse_row_attention(
        query, key, key, rows=_empty(variant.rows), scaling=0.1, **_terms(variant, positions=variant.terms)
    )


def _mass(variant: Variant) -> None:
    from rolling_kv.engine.kernels.triton_mass import attention_mass, attention_peak

    query, key = _query_and_key(variant)
    received = attention_peak if variant.terms else attention_mass
    received(
        query, key, rows=_empty(variant.rows), context=8000, scaling=0.1, **_terms(variant, positions=True)
    )


def _query_and_key(variant: Variant) -> tuple[torch.Tensor, torch.Tensor]:
    """32 heads over 8 key heads, as a model of 8 billion weights has them."""
    query = _empty(1, variant.rows, 32, variant.head_dim, dtype=variant.dtype).transpose(1, 2)
    return query, _empty(1, 8, 8192, variant.head_dim, dtype=variant.dtype)


def _terms(variant: Variant, *, positions: bool) -> dict[str, Any]:
    terms: dict[str, Any] = {"positions": _empty(8192)} if positions else {}
    if variant.terms:
        terms |= {"softcap": 5.0, "sinks": _empty(32, dtype=variant.dtype)}
    return terms


def _rows(variant: Variant) -> None:
    from rolling_kv.engine.kernels.triton_deviation import key_deviation
    from rolling_kv.engine.kernels.triton_remap import remap_keys
    from rolling_kv.engine.kernels.triton_scatter import scatter_rows

    rows, size, dtype = variant.rows, variant.head_dim, variant.dtype
    fresh = _empty(1, rows, 8, size, dtype=dtype).transpose(1, 2)
    buffer, stored = _empty(1, 8, 8192, size, dtype=dtype), _empty(8, rows, size, dtype=dtype)
    scatter_rows(fresh, fresh, keys=buffer, values=buffer, slots=_empty(rows))
    key_deviation(buffer[0], stored, rows=_empty(rows))
    turned = _empty(rows, size // 4 if variant.terms else size // 2, dtype=torch.float32)
    tokens = _empty(rows) if variant.terms else None
    places = {"out": buffer[0], "slots": _empty(rows), "tokens": tokens}
    remap_keys(stored, turned, turned, **places, interleaved=variant.terms)


def _spans(variant: Variant) -> None:
    from rolling_kv.engine.kernels.triton_spans import span_sums

    span_sums(_empty(8000, dtype=variant.dtype), _empty(84), _empty(84))


_CALLS: dict[str, Callable[[Variant], None]] = {
    "attention": _attention,
    "mass": _mass,
    "rows": _rows,
    "spans": _spans,
}

if __name__ == "__main__":
    for variant, found in compile_all(every_variant()):
        for needs in found:
            sys.stdout.write(
                f"{needs.target:<11}{needs.kernel:<11}{needs.shared:>7} B shared {needs.registers:>4} "
                f"registers {needs.spilled:>5} B spilled  {variant}\n"
            )
