"""The public face: its names, and that importing it stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import rolling_kv


def test_all_is_sorted_and_is_what_the_module_imports() -> None:
    assert rolling_kv.__all__ == sorted(rolling_kv.__all__)
    tree = ast.parse(Path(rolling_kv.__file__).read_text(encoding="utf-8"))
    imported = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported == set(rolling_kv.__all__)


def test_importing_it_imports_nothing_heavy() -> None:
    heavy = ["torch", "transformers", "triton", "sglang", "langchain", "langchain_core", "matplotlib"]
    check = f"import sys, rolling_kv; print([name for name in {heavy} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_only_the_engine_imports_transformers() -> None:
    package = Path(rolling_kv.__file__).parent
    for path in package.rglob("*.py"):
        if path.is_relative_to(package / "engine"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {"transformers", "triton", "sglang"}, path
