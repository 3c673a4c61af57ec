"""How long work reports how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Called with what is being done, and the share of it that is done, from 0 to 1."""


def no_progress(stage: str, share: float) -> None:
    """For work that nobody watches."""
