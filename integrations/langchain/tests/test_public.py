"""What the package gives out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import langchain_rolling_kv

PACKAGE = Path(langchain_rolling_kv.__file__).parent


def test_everything_public_is_listed_and_the_readme_names_what_is_no_error() -> None:
    names = langchain_rolling_kv.__all__
    assert names == sorted(names)
    readme = (PACKAGE.parent / "README.md").read_text(encoding="utf-8")
    for name in names:
        assert getattr(langchain_rolling_kv, name).__doc__
        assert name.endswith("Error") or f"`{name}`" in readme


def test_the_error_tree_is_drawn_whole() -> None:
    text = (PACKAGE / "errors.py").read_text(encoding="utf-8")
    drawn = text.split('"""')[1]
    for name in re.findall(r"^class (\w+)\(", text, flags=re.MULTILINE):
        assert name in drawn


def test_importing_loads_no_model_code() -> None:
    code = (
        "import sys, langchain_rolling_kv\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
