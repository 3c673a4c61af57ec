"""Settings that tests start from, so that no test depends on which ones are the defaults."""

from __future__ import annotations

from typing import Any

REPAIRING: dict[str, Any] = {"policy": "document-aligned", "conditioning": "window:3", "fresh_tail": 0}
"""Every part of a call has something to do."""
