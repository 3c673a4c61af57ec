"""The model families whose KV can be reused, by transformers' `model_type`."""

from __future__ import annotations

from typing import Any

from rolling_kv.errors import UnsupportedModelError

SUPPORTED_FAMILIES = ("gemma3_text", "llama", "mistral", "qwen2", "qwen3")


def require_supported(model_type: str, *, name: str) -> None:
    """Refuses what was never checked, by name.

    Raises:
        UnsupportedModelError: `model_type` is not in `SUPPORTED_FAMILIES`.
    """
    if model_type not in SUPPORTED_FAMILIES:
        raise UnsupportedModelError(
            f"The model {name!r} is of the family {model_type!r}, which is not supported. "
            f"Supported families: {', '.join(SUPPORTED_FAMILIES)}. Open a model of one of them."
        )


def sliding_window_of(config: Any) -> int | None:
    """How far back the model's sliding layers see, in tokens; None when it has no such layers."""
    kinds = getattr(config, "layer_types", None)
    window: int | None = getattr(config, "sliding_window", None)
    return window if not kinds or "sliding_attention" in kinds else None
