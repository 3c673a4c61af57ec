"""Which tokens to recompute. `POLICIES` maps every name to its factory; nothing is imported before it is
used."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, cast

from rolling_kv.errors import UnknownPolicyError
from rolling_kv.registry import Registry

if TYPE_CHECKING:
    from rolling_kv.policies.base import Policy

_CLASSES = {
    "direct-reuse": "DirectReuse",
    "document-aligned": "DocumentAligned",
    "epic": "Epic",
    "fixed-chunk": "FixedChunk",
    "full-prefill": "FullPrefill",
    "fusionrag": "FusionRAG",
    "prophetkv": "ProphetKV",
    "qcfuse": "QCFuse",
    "qcfuse-spans": "QCFuseSpans",
    "random-document": "RandomDocument",
    "single-window": "SingleWindow",
    "token-topk": "TokenTopK",
    "token-topk-gradual": "TokenTopKGradual",
}


def _factory(name: str, class_name: str) -> Callable[[], Policy]:
    def create() -> Policy:
        module = import_module(f"rolling_kv.policies.{name.replace('-', '_')}")
        return cast("Policy", getattr(module, class_name)())

    return create


POLICIES: Registry[Policy] = Registry("recompute policy", UnknownPolicyError)
for _name, _class_name in _CLASSES.items():
    POLICIES.register(_name, _factory(_name, _class_name))

__all__ = ["POLICIES"]
