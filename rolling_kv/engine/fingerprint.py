"""Fingerprints: what makes two models the same one for their KV."""

from __future__ import annotations

import json
from typing import Any

import torch
import xxhash

_IGNORED = (
    "_name_or_path",
    "transformers_version",
    "_attn_implementation",
    "architectures",
    "dtype",
    "torch_dtype",
)


def model_fingerprint(model: Any) -> str:
    """Two xxh3-128 (hex), `values-exact`, each of the configuration and of every weight with name and shape.

    `values` is of the weights rounded to bfloat16, which is what loading in bfloat16 does: a checkpoint has
    the same one whether it is loaded in float32 or in bfloat16, and it is what claims a namespace of a store.
    `exact` is of the weights as they are loaded, dtype included: in a lineage it keeps two models apart whose
    KV differs though they round to the same values. float16 rounds otherwise, and nothing undoes that, so a
    checkpoint loaded in it may have other `values`.
    """
    config = {key: value for key, value in model.config.to_diff_dict().items() if key not in _IGNORED}
    described = json.dumps(config, sort_keys=True, default=str).encode()
    values, exact = xxhash.xxh3_128(described), xxhash.xxh3_128(described)
    for name, weight in sorted(model.named_parameters()):
        shape = f"{name}{tuple(weight.shape)}".encode()
        values.update(shape)
        values.update(_bytes(weight.detach().to(torch.bfloat16)))
        exact.update(shape + str(weight.dtype).encode())
        exact.update(_bytes(weight.detach()))
    return f"{values.hexdigest()}-{exact.hexdigest()}"


def _bytes(weight: torch.Tensor) -> Any:
    return weight.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
