"""What is known of a model: published, measured and kept, or guessed."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from rolling_kv.engine import profiles
from rolling_kv.engine.host import TransformersHost
from rolling_kv.engine.profiles import ModelProfile, profile_path, read_profile, write_profile
from rolling_kv.engine.traits import traits_of
from rolling_kv.errors import ConfigError, ProfileError
from tests.tiny_models import tiny_model, tiny_tokenizer


def test_published_and_guessed_critical_layers() -> None:
    qwen = traits_of(CONFIG_MAPPING["qwen3"](num_hidden_layers=36, hidden_size=4096), None)
    assert (qwen.critical_layers, qwen.critical_guessed) == ((20, 21, 19), False)
    llama = traits_of(CONFIG_MAPPING["llama"](num_hidden_layers=30, hidden_size=576), None)
    assert (sorted(llama.critical_layers), llama.critical_guessed) == ([13, 14, 15], True)
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    gemma = traits_of(CONFIG_MAPPING["gemma3_text"](num_hidden_layers=18, layer_types=kinds * 3), None)
    assert gemma.critical_layers[0] == 11, "the full-attention layer of the middle third first"
    assert len(traits_of(CONFIG_MAPPING["llama"](num_hidden_layers=2), None).critical_layers) == 2


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLING_KV_CACHE", str(tmp_path))
    return tmp_path


def host() -> TransformersHost:
    return TransformersHost(tiny_model("llama"), tiny_tokenizer(), name="tiny-llama")


def test_a_profile_is_used_by_the_model_that_it_was_measured_on(own_cache: Path) -> None:
    before = host()
    assert before.traits.critical_guessed
    profile = ModelProfile(
        model=before.identity.values,
        name="tiny",
        critical_layers=(4, 1, 2),
        sink_token_ids=(7,),
        sink_layer=3,
    )
    assert write_profile(profile) == profile_path(before.identity.values)
    traits = host().traits
    assert (traits.critical_layers, traits.critical_guessed) == ((4, 1, 2), False)
    assert (traits.sink_token_ids, traits.sink_layer) == ({7}, 3)
    other = TransformersHost(tiny_model("llama", seed=1), tiny_tokenizer(), name="other")
    assert other.traits.critical_guessed
    assert [path.suffix for path in (own_cache / "profiles").iterdir()] == [".json"], "nothing is left over"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"version": 2}',
        '{"model": "MODEL", "name": "x", "critical_layers": []}',
        '{"model": "MODEL", "name": "x", "critical_layers": [6]}',
        '{"model": "MODEL", "name": "x", "critical_layers": [1], "sink_layer": 9}',
        '{"model": "00000000000000000000000000000000", "name": "x", "critical_layers": [1]}',
    ],
)
def test_a_damaged_profile_is_refused_by_name(own_cache: Path, text: str) -> None:
    fingerprint = "a" * 32
    path = profile_path(fingerprint)
    path.parent.mkdir()
    path.write_text(text.replace("MODEL", fingerprint), encoding="utf-8")
    with pytest.raises(ProfileError, match=r"(?s)aaaa\.json .*rolling-kv profile"):
        read_profile(fingerprint, layers=6)


def test_shipped_profiles_are_whole_and_named_after_their_model() -> None:
    folder = Path(profiles.__file__).parent / "shipped_profiles"
    for path in folder.iterdir():
        profile = ModelProfile.model_validate_json(path.read_text(encoding="utf-8"))
        assert path.name == f"{profile.model}.json"
        assert profile.measured


def test_a_demo_model_ships_with_its_profile(
    demo_engine: TransformersHost, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = read_profile(demo_engine.identity.values, layers=demo_engine.layers)
    if demo_engine.name == "gemma3-270m":
        assert profile is not None
        assert profile.critical_layers[0] == 5, "its first full-attention layer"


def test_critical_layers_that_are_given_come_before_all_others(own_cache: Path) -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    profile = ModelProfile(
        model=host().identity.values, name="tiny", critical_layers=(4,), sink_token_ids=(7,)
    )
    write_profile(profile)
    given = TransformersHost(model, tokenizer, name="tiny", critical_layers=(2, 0)).traits
    assert (given.critical_layers, given.critical_source, given.critical_guessed) == ((2, 0), "given", False)
    assert given.sink_token_ids == {7}
    for wrong in ((-1,), (1, 99), (3, 3)):
        with pytest.raises(ConfigError, match="critical_layers"):
            TransformersHost(model, tokenizer, name="tiny", critical_layers=wrong)
