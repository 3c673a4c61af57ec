"""The KV of one segment: what the store keeps and the engine computes and stitches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What of a model its KV depends on, as fingerprints (xxh3-128, hex); `name` is only for people."""

    name: str
    model: str
    tokenizer: str
    rope: str
    dtype: str
    device: str
