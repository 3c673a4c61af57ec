"""Loading a model: a local folder, a hub id, or one of the small demo models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from rolling_kv.engine.demo_models import DEMO_MODELS, demo_model_folder
from rolling_kv.engine.families import require_supported
from rolling_kv.engine.progress import Progress
from rolling_kv.errors import ConfigError, ModelNotFoundError, UnsupportedModelError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    name: str | Path, *, dtype: str, device: str, progress: Progress | None = None
) -> tuple[Any, Any]:
    """The model, in evaluation mode, and its tokenizer.

    Args:
        name: a folder, a hub id, or `demo` or the name of a demo model.
        dtype: `float32`, `bfloat16`, `float16`, or `auto` (see `choose_dtype`).
        device: `cpu`, `cuda`, `cuda:1`, ..., or `auto`: a GPU when there is one.
        progress: called with a stage and a fraction while a demo model is converted.

    Raises:
        ModelNotFoundError, UnsupportedModelError, ConfigError
    """
    place = choose_device(device)
    source = _source(name, progress)
    try:
        config = AutoConfig.from_pretrained(source)
        require_supported(config.model_type, name=str(name))
        with _no_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(
                source, dtype=choose_dtype(dtype, device=place), attn_implementation="sdpa"
            )
        tokenizer = AutoTokenizer.from_pretrained(source)
    except OSError as error:
        raise ModelNotFoundError(
            f"The model {str(name)!r} could not be loaded: {error} Expected a folder with config.json and "
            f"safetensors, a hub id, or one of: demo, {', '.join(DEMO_MODELS)}."
        ) from error
    except ValueError as error:
        raise UnsupportedModelError(f"transformers cannot load the model {str(name)!r}: {error}") from error
    return model.to(place).eval(), tokenizer


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Loading a small model is over before a bar is read; transformers' own setting is restored."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def choose_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"Unknown device {device!r}. Expected auto, cpu, cuda or cuda:<number>.") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"The device {device!r} was asked for and no CUDA GPU is available. Use device='cpu'."
        )
    return chosen


def choose_dtype(dtype: str, *, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the processor has fast bfloat16 products, float32 on older CPUs."""
    if dtype == "auto":
        slow = device.type == "cpu" and torch.backends.cpu.get_cpu_capability() in (
            "AVX2",
            "DEFAULT",
            "NO AVX",
        )
        return torch.float32 if slow else torch.bfloat16
    if dtype not in _DTYPES:
        raise ConfigError(f"Unknown dtype {dtype!r}. Expected auto, {', '.join(_DTYPES)}.")
    return _DTYPES[dtype]


def _source(name: str | Path, progress: Progress | None) -> str:
    if isinstance(name, str) and (name == "demo" or name in DEMO_MODELS):
        return str(demo_model_folder(name, progress=progress))
    folder = Path(name).expanduser()
    if folder.is_dir():
        return str(folder)
    text = str(name)
    if folder.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1 or not text.strip():
        raise ModelNotFoundError(
            f"There is no model folder {text!r}. Expected a folder with config.json and safetensors, a "
            f"hub id such as 'Qwen/Qwen3-0.6B', or one of: demo, {', '.join(DEMO_MODELS)}."
        )
    return text
