"""What the figures of a run depend on beside its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

import rolling_kv
from rolling_kv.workloads import LabelledRequest

if TYPE_CHECKING:
    from rolling_kv.engine.host import TransformersHost


def conditions(engine: TransformersHost) -> dict[str, Any]:
    """The model, what is known of it, and what computes. Rows of other conditions are never mixed."""
    import torch

    identity, traits = engine.identity, engine.traits
    return {
        "model": identity.values,
        "dtype": identity.dtype,
        "device": identity.device,
        "runtime": identity.runtime,
        "selection": _selecting_code(),
        "traits": [list(traits.critical_layers), sorted(traits.sink_token_ids)],
        "threads": torch.get_num_threads(),
    }


def _selecting_code() -> str:
    """xxh3-64 (hex, its first 8 digits) of the code that selects; the engine's is in the runtime."""
    package = Path(rolling_kv.__file__).parent
    files = [package / f"{name}.py" for name in ("call", "plan", "planner", "sampling", "signals")]
    digest = xxhash.xxh3_64()
    for path in [*files, *sorted((package / "policies").glob("*.py"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def digest_of(requests: Mapping[str, Sequence[LabelledRequest]]) -> str:
    """xxh3-128 (hex) of the first request of each workload, which another file or generator changes."""
    return xxhash.xxh3_128_hexdigest(repr([(name, found[0]) for name, found in requests.items()]).encode())
