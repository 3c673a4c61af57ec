"""How large everything is: on a GPU, and in Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Scale:
    """Shapes of one run.

    Args:
        heads, kv_heads, head_dim, layers, hidden, intermediate, vocabulary: of the model that is timed.
        lengths: prompt tokens.
        ratios: shares of the reusable tokens that are recomputed.
        documents: how many the prompt is made of.
        query: tokens of the query.
        check_keys, check_heads: of the checks against float64; (head size, dtype) pairs are `check_types`.
        copy_bytes, product: of the ceilings: bytes copied, and the side of a square matrix product.
        repeats: of a timed first token.
    """

    device: str
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    lengths: tuple[int, ...]
    ratios: tuple[float, ...]
    documents: int
    query: int
    check_keys: int
    check_heads: tuple[int, int]
    check_types: tuple[tuple[int, torch.dtype], ...]
    copy_bytes: int
    product: int
    repeats: int

    @property
    def interpreted(self) -> bool:
        return self.device == "cpu"


# A model of the shape of Llama-3.1-8B, with random weights.
GPU = Scale(
    device="cuda",
    dtype=torch.bfloat16,
    heads=32,
    kv_heads=8,
    head_dim=128,
    layers=32,
    hidden=4096,
    intermediate=14336,
    vocabulary=128256,
    lengths=(8192, 32768),
    ratios=(0.05, 0.1),
    documents=84,
    query=32,
    check_keys=1500,
    check_heads=(8, 2),
    check_types=(
        (64, torch.bfloat16),
        (80, torch.bfloat16),
        (96, torch.float16),
        (128, torch.bfloat16),
        (128, torch.float32),
        (256, torch.bfloat16),
        (256, torch.float32),
    ),
    copy_bytes=1 << 32,
    product=8192,
    repeats=5,
)

INTERPRETER = Scale(
    device="cpu",
    dtype=torch.float32,
    heads=4,
    kv_heads=2,
    head_dim=16,
    layers=2,
    hidden=32,
    intermediate=48,
    vocabulary=260,
    lengths=(40,),
    ratios=(0.1,),
    documents=4,
    query=4,
    check_keys=60,
    check_heads=(4, 2),
    check_types=((16, torch.float32), (24, torch.bfloat16)),
    copy_bytes=1 << 20,
    product=64,
    repeats=1,
)
