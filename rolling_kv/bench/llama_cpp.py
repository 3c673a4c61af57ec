"""llama.cpp beside us, on the same GGUF file and token ids."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rolling_kv.errors import ConfigError, MissingExtraError


class LlamaCpp:
    """A GGUF model in llama.cpp, with as many threads as torch has.

    Raises:
        ConfigError: there is no such file. MissingExtraError: llama-cpp-python is not installed.
    """

    def __init__(self, path: Path, *, positions: int, threads: int) -> None:
        if not path.is_file():
            raise ConfigError(
                f"--llama-cpp is {str(path)!r}, and there is no such file; expected a GGUF file."
            )
        try:
            llama_cpp: Any = import_module("llama_cpp")  # an extra that no environment of ours has
        except ImportError as error:
            raise MissingExtraError(
                "--llama-cpp needs llama-cpp-python, which is not installed. "
                "Run: pip install llama-cpp-python"
            ) from error
        self.name = f"llama-cpp-python {llama_cpp.__version__}, {path.name}"
        self._model = llama_cpp.Llama(
            model_path=str(path),
            n_ctx=positions,
            n_threads=threads,
            n_threads_batch=threads,
            verbose=False,
        )

    def ttft(self, token_ids: Sequence[int]) -> float:
        """Seconds from nothing to the logits after `token_ids`."""
        self._model.reset()
        started = time.perf_counter()
        self._model.eval(list(token_ids))
        return time.perf_counter() - started
