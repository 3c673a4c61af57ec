"""Runs the command line within a test."""

from __future__ import annotations

import sys

import pytest

from rolling_kv.cli import main


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of `rolling-kv` with these arguments."""
    monkeypatch.setattr(sys, "argv", ["rolling-kv", *map(str, arguments)])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0
