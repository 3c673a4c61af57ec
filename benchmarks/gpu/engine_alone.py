"""Importing `rolling_kv.engine` without the package's public face and profiles, and so without pydantic and
others: a machine with a GPU and torch need not have them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

ROOT = Path(__file__).parents[2]


def import_engine_alone() -> None:
    """From now on, in this process, `rolling_kv` is an empty package around its own modules, and no model has
    a profile: one with random weights has none."""
    package = ModuleType("rolling_kv")
    package.__path__ = [str(ROOT / "rolling_kv")]
    profiles = ModuleType("rolling_kv.engine.profiles")
    vars(profiles).update(ModelProfile=SimpleNamespace, read_profile=lambda fingerprint, *, layers: None)
    sys.modules |= {package.__name__: package, profiles.__name__: profiles}
