"""Shared by the tests of the integration."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scripted import tiny_engine

from rolling_kv.engine.host import TransformersHost
from tests.tiny_models import tiny_model, tiny_tokenizer


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def engine() -> TransformersHost:
    return tiny_engine()


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model, in a folder as a user has it."""
    folder = tmp_path_factory.mktemp("tiny-other")
    tiny_model("llama", seed=7).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
