"""The KV of one segment: what the store keeps and the engine computes and stitches."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class SegmentKV:
    """Keys and values of one segment, in the model's dtype, immutable by convention.

    Keys are rotated for the positions at which they were computed, `start` and the ones after it;
    moving them to other positions is a rotation by the difference (`engine/rope.py`).
    """

    k: torch.Tensor  # [layers, kv_heads, tokens, head_dim]
    v: torch.Tensor  # [layers, kv_heads, tokens, head_dim]
    token_ids: tuple[int, ...]
    start: int

    def __len__(self) -> int:
        return len(self.token_ids)

    def on_host(self) -> SegmentKV:
        """The same in host memory."""
        if self.k.device.type == "cpu":
            return self
        return SegmentKV(k=self.k.cpu(), v=self.v.cpu(), token_ids=self.token_ids, start=self.start)

    @property
    def nbytes(self) -> int:
        return self.k.numel() * self.k.element_size() + self.v.numel() * self.v.element_size()


@lru_cache(maxsize=1)
def current_runtime() -> str:
    """What decides the last bits, such as "torch 2.13.0, transformers 5.24.0, engine 1f0c6a52".

    The engine is this package's own: xxh3-64 (hex, its first 8 digits) of its code.
    """
    digest = xxhash.xxh3_64()
    for path in sorted((Path(__file__).parent / "engine").rglob("*.py")):
        digest.update(path.read_bytes())
    releases = [f"{package} {version(package)}" for package in ("torch", "transformers")]
    return ", ".join([*releases, f"engine {digest.hexdigest()[:8]}"])


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What of a model its KV depends on; fingerprints are xxh3-128 (hex).

    Args:
        name: what the model is called; only for people.
        model: fingerprint of its configuration and weights (`engine/fingerprint.py`).
        runtime: the releases and the code that compute; other ones may round differently.
    """

    name: str
    model: str
    tokenizer: str
    rope: str
    dtype: str
    device: str
    runtime: str = field(default_factory=current_runtime)

    @property
    def values(self) -> str:
        """The part of `model` that is the same in whichever dtype the model is loaded."""
        return self.model.partition("-")[0]
