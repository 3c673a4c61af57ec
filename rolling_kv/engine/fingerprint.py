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
    """xxh3-128 (hex) of the configuration and of every weight, name, shape and dtype included."""
    config = {key: value for key, value in model.config.to_diff_dict().items() if key not in _IGNORED}
    digest = xxhash.xxh3_128(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(weight.shape)}{weight.dtype}".encode())
        data = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(data)
    return digest.hexdigest()
