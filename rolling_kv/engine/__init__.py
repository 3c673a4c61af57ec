"""How KV is computed: passes, hosts, rope, kernels, models. Only this folder imports transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rolling_kv.engine.progress import Progress

if TYPE_CHECKING:
    from rolling_kv.engine.host import TransformersHost


def load_engine(
    model: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    critical_layers: Sequence[int] = (),
    progress: Progress | None = None,
) -> TransformersHost:
    """Loads a model to share between sessions (`RollingSession.open(model=engine)`).

    Args:
        model: a local folder, a hub id, or `demo`, `smollm2`, `gemma3-270m`.
        dtype: `auto`, `float32`, `bfloat16` or `float16`; `auto` is bfloat16 where it is fast, else float32.
        device: `auto`, `cpu`, `cuda`, ...
        critical_layers: 0-based, best first: used by `qcfuse` instead of those that are known of the model.
        progress: called with a stage and a fraction from 0 to 1 while a demo model is converted, once.

    Raises:
        ModelNotFoundError, UnsupportedModelError, ConfigError
    """
    from rolling_kv.engine.host import TransformersHost
    from rolling_kv.engine.models import load_model

    loaded, tokenizer = load_model(model, dtype=dtype, device=device, progress=progress)
    return TransformersHost(loaded, tokenizer, name=str(model), critical_layers=critical_layers)


__all__ = ["load_engine"]
