"""The model of a command that measures, and what its report says of it."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from rolling_kv.errors import ConfigError

if TYPE_CHECKING:
    from rolling_kv.engine.host import TransformersHost


def parse_layers(text: str) -> tuple[int, ...]:
    """`5,2,3` as numbers; none of an empty text.

    Raises:
        ConfigError
    """
    try:
        return tuple(int(part) for part in text.split(",")) if text.strip() else ()
    except ValueError as error:
        raise ConfigError(f"Layers are {text!r}; expected numbers such as 5,2,3.") from error


def loaded(
    model: str, *, dtype: str, device: str, progress: Any, critical_layers: tuple[int, ...] = ()
) -> TransformersHost:
    """The engine of a command."""
    from rolling_kv.engine import load_engine

    return load_engine(model, dtype=dtype, device=device, progress=progress, critical_layers=critical_layers)


def about(engine: TransformersHost) -> dict[str, Any]:
    """What a report says of the machine and the model."""
    import torch

    on_gpu = engine.device.type == "cuda"
    return {
        "model": asdict(engine.identity),
        "hardware": {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "gpu": torch.cuda.get_device_name(engine.device) if on_gpu else None,
        },
        "versions": {name: version(name) for name in ("torch", "transformers", "rolling-kv")},
        "critical_layers": {
            "layers": list(engine.traits.critical_layers),
            "source": engine.traits.critical_source,
        },
    }
