"""The computations over stitched KV that the models themselves do not have."""

from rolling_kv.engine.kernels.torch_attention import sparse_row_attention
from rolling_kv.engine.kernels.torch_mass import attention_mass, attention_peak
from rolling_kv.engine.kernels.torch_remap import remap_keys

__all__ = ["attention_mass", "attention_peak", "remap_keys", "sparse_row_attention"]
