"""The command line, `rolling-kv`."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line; what rolling_kv raises on purpose is shown as one message, exit code 1."""
    from rolling_kv.cli.app import app
    from rolling_kv.cli.options import as_options
    from rolling_kv.cli.output import errors
    from rolling_kv.errors import RollingKVError

    try:
        app()
    except RollingKVError as error:
        errors.print(f"[red]{type(error).__name__}:[/red]", end=" ")
        errors.print(as_options(str(error)), markup=False, highlight=False)
        sys.exit(1)


__all__ = ["main"]
