"""Literal float64 versions of the computations: one head, one row and one key after the other."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

EXACTNESS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""The largest relative error ||ours - reference|| / ||reference|| that rounding explains."""


def error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """||ours - reference|| / ||reference||, or ||ours|| when the reference is zero."""
    size = float(reference.double().norm())
    return float((ours.double() - reference.double()).norm()) / (size or 1.0)


@dataclass(frozen=True)
class Attention:
    """Inputs of an attention and what it sees.

    Args:
        rows: [rows], slots of the rows among the keys, ascending; a row stands where that key does.
        gap: positions between two neighbouring keys.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    rows: torch.Tensor
    gap: int
    scaling: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None

    @classmethod
    def random(
        cls,
        *,
        rows: list[int],
        keys: int = 70,
        kv_heads: int = 2,
        group: int = 3,
        head_dim: int = 16,
        dtype: torch.dtype = torch.float32,
        gap: int = 1,
        window: int | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        seed: int = 0,
    ) -> Attention:
        source = torch.Generator().manual_seed(seed)
        room = keys + 40  # as in stitched KV, whose buffers are longer than what attention sees
        query = torch.randn(1, len(rows), kv_heads * group, head_dim, generator=source).transpose(1, 2)
        key, value = (torch.randn(1, kv_heads, room, head_dim, generator=source) for _ in range(2))
        return cls(
            query=query.to(dtype) * 2,
            key=key.to(dtype)[:, :, :keys],
            value=value.to(dtype)[:, :, :keys],
            rows=torch.tensor(rows),
            gap=gap,
            scaling=head_dim**-0.5,
            window=window,
            softcap=softcap,
            sinks=torch.randn(kv_heads * group, generator=source) if sinks else None,
        )

    @property
    def positions(self) -> torch.Tensor:
        return torch.arange(self.key.shape[2]) * self.gap

    def weights(self) -> torch.Tensor:
        """Softmax weights, [heads, rows, keys], float64."""
        _, heads, rows, _ = self.query.shape
        group = heads // self.key.shape[1]
        weights = torch.zeros(heads, rows, self.key.shape[2], dtype=torch.float64)
        for head in range(heads):
            for row, at in enumerate((self.rows * self.gap).tolist()):
                scores = (self.key[0, head // group].double() @ self.query[0, head, row].double()).tolist()
                terms = []
                for position, score in zip(self.positions.tolist(), scores, strict=True):
                    seen = position <= at and (self.window is None or at - position < self.window)
                    score *= self.scaling
                    if self.softcap is not None:
                        score = self.softcap * math.tanh(score / self.softcap)
                    terms.append(math.exp(score) if seen else 0.0)
                sink = 0.0 if self.sinks is None else math.exp(float(self.sinks[head]))
                weights[head, row] = torch.tensor(terms, dtype=torch.float64) / (sum(terms) + sink)
        return weights

    def output(self) -> torch.Tensor:
        """[1, heads, rows, head_dim], float64."""
        group = self.query.shape[1] // self.key.shape[1]
        return self.weights()[None] @ self.value.double().repeat_interleave(group, dim=1)
