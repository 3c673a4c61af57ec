"""What the figures of a run depend on beside its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import xxhash

from rolling_kv.workloads import LabelledRequest

if TYPE_CHECKING:
    from rolling_kv.engine.host import TransformersHost


def conditions(engine: TransformersHost) -> dict[str, Any]:
    """The model, and what computes it. Rows of other conditions are never mixed."""
    import torch

    identity = engine.identity
    return {
        "model": identity.values,
        "dtype": identity.dtype,
        "device": identity.device,
        "runtime": identity.runtime,
        "threads": torch.get_num_threads(),
    }


def digest_of(requests: Mapping[str, Sequence[LabelledRequest]]) -> str:
    """xxh3-128 (hex) of the first request of each workload, which another file or generator changes."""
    return xxhash.xxh3_128_hexdigest(repr([(name, found[0]) for name, found in requests.items()]).encode())
