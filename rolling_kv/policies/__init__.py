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
    "sink-repair": "SinkRepair",
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


def create_policy(name: str) -> Policy:
    """The policy of that name; `sink-repair:<policy>` wraps another one.

    Raises:
        UnknownPolicyError: there is none, or it cannot be wrapped.
    """
    wrapper, _, wrapped = str(name).partition(":")
    if not wrapped:
        return POLICIES.create(name)
    inner = POLICIES.create(wrapped)
    if wrapper != "sink-repair" or wrapped == wrapper or not (inner.reuses and inner.recomputes):
        raise UnknownPolicyError(
            f"Unknown recompute policy {name!r}. Only sink-repair wraps another policy, and only one that "
            "recomputes some of what is reused, for example sink-repair:document-aligned."
        )
    from rolling_kv.policies.sink_repair import SinkRepair

    return SinkRepair(inner=inner)


__all__ = ["POLICIES", "create_policy"]
