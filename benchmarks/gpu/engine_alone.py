"""Importing `rolling_kv.engine` without the package's public face, and so without its dependencies."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def import_engine_alone() -> None:
    """From now on `rolling_kv` is an empty package around its own modules, in this process."""
    package = ModuleType("rolling_kv")
    package.__path__ = [str(ROOT / "rolling_kv")]
    sys.modules["rolling_kv"] = package
