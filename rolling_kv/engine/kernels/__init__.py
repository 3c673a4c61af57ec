"""The computations over stitched KV that the models themselves do not have.

Every one is a function here, a torch reference (`torch_*.py`, also the CPU path) and a Triton kernel
(`triton_*.py`, the GPU path) of the same signature; `dispatch.py` chooses.
"""

from rolling_kv.engine.kernels.dispatch import (
    attention_mass,
    attention_peak,
    key_deviation,
    remap_keys,
    scatter_rows,
    span_sums,
    sparse_row_attention,
)

__all__ = [
    "attention_mass",
    "attention_peak",
    "key_deviation",
    "remap_keys",
    "scatter_rows",
    "span_sums",
    "sparse_row_attention",
]
