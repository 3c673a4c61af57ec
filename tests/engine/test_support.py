"""What is refused, and how it is said: families, rope, tokenizers, devices, dtypes, models that are not
there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from rolling_kv import load_engine
from rolling_kv.engine.host import TransformersHost
from rolling_kv.errors import ConfigError, ModelNotFoundError, UnsupportedModelError
from tests.engine.stock import stock_kv
from tests.tiny_models import tiny_model, tiny_tokenizer


def test_an_unsupported_family_is_refused_by_name() -> None:
    config = CONFIG_MAPPING["gpt_neox"](
        vocab_size=260, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModelError, match=r"'neox'.*'gpt_neox'.*Supported families: .*llama"):
        TransformersHost(model, tiny_tokenizer(), name="neox")


def test_an_unsupported_family_in_a_folder_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    CONFIG_MAPPING["falcon"](num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="'falcon'"):
        load_engine(tmp_path)


def test_rope_that_depends_on_the_length_is_refused() -> None:
    model = tiny_model("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(UnsupportedModelError, match="'dynamic' rope"):
        TransformersHost(model, tiny_tokenizer(), name="dynamic")


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 5e5,
        },
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 1e4},
    ],
    ids=lambda rope: str(rope["rope_type"]),
)
def test_scaled_rope_is_remapped_exactly(rope: dict[str, object]) -> None:
    """Yarn multiplies keys by an attention factor; moving them must not apply it twice."""
    from rolling_kv.engine.stitch import PlacedKV

    engine = TransformersHost(tiny_model("llama", rope_parameters=rope), tiny_tokenizer(), name="scaled")
    ids = tuple(range(50))
    stitched = engine.stitch([PlacedKV(kv=engine.extend([], ids), position=700)], capacity=750)
    for layer, (keys, _) in enumerate(stock_kv(engine, ids, start=700)):
        torch.testing.assert_close(stitched.layer(layer)[0][0, :, 700:], keys, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./missing", "~/missing", "a/b/c", " "])
def test_a_missing_model_says_what_can_be_opened(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"Expected a folder .* demo, gemma3-270m, smollm2"):
        load_engine(name)


def test_a_folder_without_a_model_says_so(tmp_path: Path) -> None:
    with pytest.raises((ModelNotFoundError, UnsupportedModelError), match=tmp_path.name):
        load_engine(tmp_path)


@pytest.mark.parametrize("setting", [{"dtype": "int7"}, {"device": "abacus"}])
def test_unknown_dtype_and_device(llama_folder: Path, setting: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"Unknown (dtype|device) .* Expected auto"):
        load_engine(llama_folder, **setting)


def test_fingerprints_tell_models_apart_and_the_same_one_together(llama_folder: Path) -> None:
    loaded, again = load_engine(llama_folder, dtype="float32"), load_engine(llama_folder, dtype="float32")
    other = TransformersHost(tiny_model("llama", seed=1), tiny_tokenizer(), name="other")
    same = TransformersHost(tiny_model("llama"), tiny_tokenizer(), name="same")
    assert loaded.identity.model == again.identity.model == same.identity.model
    assert loaded.identity.model != other.identity.model
    assert loaded.identity.tokenizer == same.identity.tokenizer
    longer = TransformersHost(
        tiny_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 77.0}),
        tiny_tokenizer(),
        name="x",
    )
    assert longer.identity.rope != same.identity.rope
