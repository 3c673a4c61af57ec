"""Rope: moving stored keys to other positions, exactly.

Keys are stored as the model rotated them. Rotations compose, so a key rotated for position p and rotated
again by d is the key rotated for p + d (Su et al., 2021, equation 34). What a model multiplies keys by
besides (yarn's attention factor) is in the stored key already and is left alone. A difference of 0 changes
no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from rolling_kv.errors import UnsupportedModelError

_STATIC_ROPE = ("default", "linear", "llama3", "yarn")

Rotation = tuple[torch.Tensor, torch.Tensor]  # cos, sin: [tokens, head_dim / 2], float32


@dataclass(frozen=True, slots=True)
class Rope:
    """The inverse frequencies of every layer, half-split layout.

    Args:
        tables: distinct inverse frequencies, each [head_dim / 2], float32.
        layer_table: for every layer, the index of its table.
    """

    tables: tuple[torch.Tensor, ...]
    layer_table: tuple[int, ...]

    @property
    def fingerprint(self) -> str:
        digest = xxhash.xxh3_128()
        for table in self.tables:
            digest.update(table.cpu().numpy().tobytes())
        digest.update(repr(self.layer_table).encode())
        return digest.hexdigest()

    def rotations(self, stored: torch.Tensor, requested: torch.Tensor) -> list[Rotation]:
        """For every table, the rotation of each token from `stored` to `requested`, [tokens] positions.

        The model rounds its angles to float32. Taking the difference of the two rounded angles, in float64,
        gives the keys that the model itself would give there, also far from where they were stored.
        """
        rotations = []
        for table in self.tables:
            angles = [positions.to(torch.float32)[:, None] * table for positions in (stored, requested)]
            difference = angles[1].double() - angles[0].double()
            rotations.append((difference.cos().float(), difference.sin().float()))
        return rotations


def rope_of(model: Any, *, name: str, head_dim: int) -> Rope:
    """Reads the frequencies that the model itself rotates with.

    Raises:
        UnsupportedModelError: frequencies that depend on the length, or that cover a part of the head only.
    """
    module = model.get_decoder().rotary_emb
    layers = model.config.num_hidden_layers
    layer_types: Sequence[str | None] = (
        model.config.layer_types if isinstance(module.rope_type, dict) else [None] * layers
    )
    distinct = sorted(set(layer_types), key=str)
    tables = []
    for layer_type in distinct:
        kind = module.rope_type[layer_type] if isinstance(module.rope_type, dict) else module.rope_type
        if kind not in _STATIC_ROPE:
            raise UnsupportedModelError(
                f"The model {name!r} uses {kind!r} rope, whose frequencies depend on the prompt's "
                f"length, so its keys cannot be moved. Supported: {', '.join(_STATIC_ROPE)}."
            )
        table = module.inv_freq if layer_type is None else getattr(module, f"{layer_type}_inv_freq")
        if 2 * table.numel() != head_dim:
            raise UnsupportedModelError(
                f"The model {name!r} rotates {2 * table.numel()} of {head_dim} dimensions of a head; "
                "only full half-split rope is supported."
            )
        tables.append(table.detach().to(torch.float32).clone())
    return Rope(tables=tuple(tables), layer_table=tuple(distinct.index(kind) for kind in layer_types))
