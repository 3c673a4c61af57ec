"""From one GGUF file to a folder of config, bf16 safetensors and tokenizer that transformers loads at once.

transformers does the conversion. On its own it takes a minute for a small model, nearly all of it spent on
reading every token of the vocabulary three times over and on building one table of tensor names once per
submodule; `_quick_gguf` takes exactly that away, and the weights stay bit for bit what they would be without.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rolling_kv.engine.progress import Progress, no_progress

_LONG_ARRAY = 1024  # elements; shorter metadata arrays can be settings, longer ones are vocabularies
_PATCH_LOCK = threading.Lock()


def convert_gguf(source: Path, target: Path, *, progress: Progress | None = None) -> None:
    """Write the model and the tokenizer of a GGUF file into a folder.

    Args:
        source: the GGUF file, of an architecture that transformers can read.
        target: an existing folder; config.json, model.safetensors (bf16) and the tokenizer's files go there.
        progress: called through the work.

    Holds the dequantised model in memory: two bytes a parameter, and a little more for its largest tensor.
    """
    report = progress or no_progress
    report("importing transformers", 0.0)
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    def dequantising(share: float) -> None:
        report("dequantising weights", min(0.4 + 0.45 * share, 0.85))

    origin = {"gguf_file": source.name}
    with _quiet_transformers(), _quick_gguf(dequantising):
        report("reading the configuration", 0.1)
        config = AutoConfig.from_pretrained(source.parent, **origin)
        report("building the tokenizer", 0.15)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **origin)
        tokenizer.save_pretrained(target)
        dequantising(0.0)
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, config=config, dtype=torch.bfloat16, **origin
        )
        report("writing weights", 0.85)
        # The weights are plain now; what still calls them quantised would make save_pretrained refuse.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.hf_quantizer = None
        model.save_pretrained(target)
    report("done", 1.0)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hide transformers' notices and progress bars inside the block: the caller shows one bar of its own."""
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # This bar is tqdm's own and does not follow the setting.
        with _replaced(modeling_gguf_pytorch_utils, "tqdm", lambda items, **_options: items):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _quick_gguf(report: Callable[[float], None]) -> Iterator[None]:
    """Make the `gguf` package quick inside the block, and report the share of the tensors dequantised.

    transformers looks these names up whenever it reads a file. Should it stop, conversion is slow, not wrong.
    """
    import gguf

    stock_dequantize, stock_names = gguf.dequantize, gguf.get_tensor_name_map
    read = functools.cache(_skimming_reader(gguf.GGUFReader))
    done, total = 0, 1  # bytes of quantised tensors

    def open_file(path: str) -> Any:
        nonlocal total
        reader = read(str(path))
        total = sum(int(tensor.n_bytes) for tensor in reader.tensors)
        return reader

    def dequantize(data: Any, kind: Any) -> Any:
        nonlocal done
        values = stock_dequantize(data, kind)
        done += int(data.nbytes)
        report(min(done / total, 1.0))
        return values

    with _PATCH_LOCK, ExitStack() as patches:
        patches.enter_context(_replaced(gguf, "GGUFReader", open_file))
        patches.enter_context(_replaced(gguf, "dequantize", dequantize))
        patches.enter_context(_replaced(gguf, "get_tensor_name_map", functools.cache(stock_names)))
        yield


def _skimming_reader(stock: type[Any]) -> type[Any]:
    """A `gguf.GGUFReader` that steps over long metadata arrays, keeping no more than how long they are.

    The tokenizer is built by another reader of transformers'; the model needs the vocabulary's size alone.
    """
    import numpy as np
    from gguf import GGUFValueType

    class SkimmingReader(stock):  # type: ignore[misc]
        def _get_field_parts(
            self, orig_offs: int, raw_type: int
        ) -> tuple[int, list[Any], list[int], list[Any]]:
            if GGUFValueType(raw_type) is not GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)  # type: ignore[no-any-return]
            item, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            item_type, count, size = GGUFValueType(item[0]), int(length[0]), 12
            types = [GGUFValueType.ARRAY, item_type]
            if count < _LONG_ARRAY or item_type is GGUFValueType.ARRAY or self.byte_order != "I":
                return super()._get_field_parts(orig_offs, raw_type)  # type: ignore[no-any-return]
            if item_type is not GGUFValueType.STRING:
                size += count * np.dtype(self.gguf_scalar_to_np[item_type]).itemsize
                return size, [item, length], [], types
            data = memoryview(self.data)[orig_offs:]
            for _ in range(count):
                size += 8 + int.from_bytes(data[size : size + 8], sys.byteorder)
            # One empty string, the third part, stands for each of them.
            return size, [item, length, np.empty(0, np.uint8)], [2] * count, types

    return SkimmingReader


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Put another value under a name that exists, for the length of the block."""
    if not hasattr(owner, name):
        yield
        return
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
