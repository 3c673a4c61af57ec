"""What every command prints with: results on standard output, progress and errors on standard error."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

results = Console()
errors = Console(stderr=True)


def print_json(value: Any) -> None:
    """One JSON document on standard output; lists of numbers on one line."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    # In JSON a line break stands between values only, never in a string.
    text = re.sub(r"\[\n\s+([\d\s,.eE+-]+?)\n\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)
    sys.stdout.write(text + "\n")


@contextmanager
def progress_bar() -> Iterator[Callable[[str, float], None]]:
    """A bar on standard error that appears with the first report of (stage, fraction from 0 to 1)."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeElapsedColumn(), console=errors, transient=True) as progress:
        tasks: dict[str, Any] = {}

        def report(stage: str, fraction: float) -> None:
            task = tasks.get("bar")
            if task is None:
                task = tasks["bar"] = progress.add_task(stage, total=1.0)
            progress.update(task, description=stage, completed=fraction)

        yield report
