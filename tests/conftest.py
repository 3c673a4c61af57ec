"""Shared by all tests: tiny models of every family, made from configurations, and the demo models."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["TRITON_INTERPRET"] = "1"  # kernels run on the CPU; torch imports triton, and then it is too late

import torch

from rolling_kv.engine.host import TransformersHost
from tests.tiny_models import FAMILIES, tiny_model, tiny_tokenizer


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Bits are compared on one machine with one number of threads; two of them only contend on small
    tensors."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", params=FAMILIES)
def tiny_engine(request: pytest.FixtureRequest) -> TransformersHost:
    """A tiny random model of each supported family."""
    return TransformersHost(tiny_model(request.param), tiny_tokenizer(), name=f"tiny-{request.param}")


@pytest.fixture(scope="session")
def llama_engine() -> TransformersHost:
    """One tiny model, for tests that are not about families."""
    return TransformersHost(tiny_model("llama"), tiny_tokenizer(), name="tiny-llama")


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in a folder, as a user has it."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["smollm2", "gemma3-270m"])
def demo_engine(request: pytest.FixtureRequest) -> Iterator[TransformersHost]:
    """Each demo model in float32; it is converted when no run did so before."""
    from rolling_kv import load_engine

    yield load_engine(request.param, dtype="float32", device="cpu")
    gc.collect()
