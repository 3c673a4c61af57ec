"""Conversion of a GGUF file made here, compared with what transformers loads from it by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from rolling_kv.engine.gguf_conversion import convert_gguf

LAYERS, HIDDEN, HEADS, KV_HEADS, FEED_FORWARD = 2, 64, 4, 2, 96
VOCABULARY = 3000  # longer than what the reader keeps
TEXTS = ("", "low lower", "  spaces\n\tand tabs", "17.25 and w1234", "naïve 日本 🙂")


def tiny_llama(path: Path, *, seed: int = 0) -> Path:
    """A random llama in a GGUF file, with a byte-level vocabulary long enough to be stepped over."""
    rng = np.random.default_rng(seed)
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    letters = sorted({*map(chr, range(33, 127)), *map(chr, range(161, 256)), *map(chr, range(256, 324))})
    words = [f"w{number}" for number in range(VOCABULARY - len(letters) - 3)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<|end|>", "lo", "low", *letters, *words])
    writer.add_token_types([TokenType.CONTROL] + [TokenType.NORMAL] * (VOCABULARY - 1))
    writer.add_token_merges(["l o", "lo w"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)

    def add(name: str, *shape: int) -> None:
        values = rng.normal(0, 0.02, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values)
        else:
            packed = gguf.quantize(values, GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=GGMLQuantizationType.Q8_0)

    add("token_embd.weight", VOCABULARY, HIDDEN)
    add("output_norm.weight", HIDDEN)
    kv_width = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        for name, *shape in (
            ("attn_norm", HIDDEN),
            ("attn_q", HIDDEN, HIDDEN),
            ("attn_k", kv_width, HIDDEN),
            ("attn_v", kv_width, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN),
            ("ffn_norm", HIDDEN),
            ("ffn_gate", FEED_FORWARD, HIDDEN),
            ("ffn_up", FEED_FORWARD, HIDDEN),
            ("ffn_down", HIDDEN, FEED_FORWARD),
        ):
            add(f"blk.{layer}.{name}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("converted")
    convert_gguf(source, target)
    return target


def test_the_weights_are_what_transformers_loads_from_the_file(source: Path, converted: Path) -> None:
    stock = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    ours = AutoModelForCausalLM.from_pretrained(converted, dtype="auto")
    expected, found = stock.state_dict(), ours.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name], tensor), name
    stored = load_file(converted / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}


def test_the_configuration_keeps_the_vocabulary_and_says_nothing_of_quantisation(converted: Path) -> None:
    config = AutoModelForCausalLM.from_pretrained(converted, dtype="auto").config
    assert config.vocab_size == VOCABULARY
    assert config.num_hidden_layers == LAYERS
    assert not hasattr(config, "quantization_config")


def test_the_tokenizer_gives_the_same_ids(source: Path, converted: Path) -> None:
    stock = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    ours = AutoTokenizer.from_pretrained(converted)
    for text in TEXTS:
        assert ours(text)["input_ids"] == stock(text)["input_ids"]
    assert ours("low")["input_ids"] == [2]


def test_progress_grows_to_one(source: Path, tmp_path: Path) -> None:
    steps: list[tuple[str, float]] = []
    convert_gguf(source, tmp_path, progress=lambda stage, share: steps.append((stage, share)))
    shares = [share for _, share in steps]
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert shares[-1] == 1.0
    assert len({share for stage, share in steps if stage == "dequantising weights"}) > LAYERS


def state() -> tuple[Any, ...]:
    """Everything that a conversion changes for its time."""
    from transformers import modeling_gguf_pytorch_utils as loader

    patched = (gguf.GGUFReader, gguf.dequantize, gguf.get_tensor_name_map, loader.tqdm)
    return (*patched, logging.get_verbosity(), logging.is_progress_bar_enabled())


def test_nothing_stays_changed(source: Path, tmp_path: Path) -> None:
    before = state()
    convert_gguf(source, tmp_path)
    assert state() == before


def test_nothing_stays_changed_after_an_error(tmp_path: Path) -> None:
    before = state()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no such thing as GGUF here")
    with pytest.raises(ValueError, match="GGUF"):
        convert_gguf(broken, tmp_path)
    assert state() == before


def test_it_prints_nothing(source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    convert_gguf(source, tmp_path)
    assert capfd.readouterr() == ("", "")
