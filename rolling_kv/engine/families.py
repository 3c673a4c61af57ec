"""The model families whose KV can be reused, by transformers' `model_type`."""

from __future__ import annotations

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
