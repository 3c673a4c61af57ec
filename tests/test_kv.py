"""What KV depends on beside the model: releases, and the code that computes it."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

import rolling_kv.kv
from rolling_kv.kv import current_runtime


def copied(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, folder / "kv.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_other_code_of_the_engine_is_another_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Path(rolling_kv.kv.__file__).parent
    shutil.copy(package / "kv.py", tmp_path)
    shutil.copytree(package / "engine", tmp_path / "engine")
    same = copied(tmp_path, "kv_same", monkeypatch).current_runtime()
    assert same == current_runtime()
    assert re.fullmatch(r"torch \S+, transformers \S+, engine [0-9a-f]{8}", same)
    changed = tmp_path / "engine" / "kernels" / "torch_attention.py"
    changed.write_text(changed.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    other = copied(tmp_path, "kv_other", monkeypatch).current_runtime()
    assert other.rpartition(" ")[0] == same.rpartition(" ")[0]
    assert other != same
