"""Fingerprints: one model is the same one in every dtype, and no two models have one lineage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rolling_kv import load_engine
from rolling_kv.engine.fingerprint import model_fingerprint
from rolling_kv.engine.host import TransformersHost
from rolling_kv.errors import StoreModelMismatchError
from rolling_kv.store import make_lineage
from rolling_kv.store.disk import DiskStore
from tests.tiny_models import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    tiny_model("llama").to(getattr(torch, request.param)).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_a_checkpoint_is_one_model_in_float32_and_bfloat16(checkpoint: Path, tmp_path: Path) -> None:
    wide, narrow = (load_engine(checkpoint, dtype=dtype).identity for dtype in ("float32", "bfloat16"))
    assert wide.values == narrow.values
    assert wide.model != narrow.model
    store = DiskStore(tmp_path / "store")
    for identity in (wide, narrow, wide):
        store.claim("default", identity)
    with pytest.raises(StoreModelMismatchError, match="float16 rounds weights"):
        store.claim("default", load_engine(checkpoint, dtype="float16").identity)
    store.close()


def test_models_that_differ_below_bfloat16_are_claimed_together_and_never_share_kv() -> None:
    def changed() -> Any:
        model = tiny_model("llama")
        weight = model.model.layers[3].mlp.up_proj.weight
        with torch.no_grad():
            weight[0, 0] = torch.tensor(1.0)
        return model

    one, other = changed(), changed()
    with torch.no_grad():
        other.model.layers[3].mlp.up_proj.weight[0, 0] += 2.0**-20
    identities = [TransformersHost(model, tiny_tokenizer(), name="x").identity for model in (one, other)]
    assert identities[0].values == identities[1].values
    keys = {make_lineage(identity, namespace="n", path=[(1, 2)]).key for identity in identities}
    assert len(keys) == 2


def test_a_weight_that_differs_or_moves_is_another_model() -> None:
    model = tiny_model("llama")
    before = model_fingerprint(model)
    weight = model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight[[0, 1]] = weight[[1, 0]]
    after = model_fingerprint(model)
    assert before.partition("-")[0] != after.partition("-")[0]
    assert before.partition("-")[2] != after.partition("-")[2]
    with torch.no_grad():
        weight[[0, 1]] = weight[[1, 0]]
    assert model_fingerprint(model) == before
