"""Rows outlive a run that was stopped, and never mix with those of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rolling_kv.bench.rows import Rows
from rolling_kv.errors import BenchError

SETTINGS = {"seed": 1, "ratios": (0.1, 0.2), "kind": "x"}


def added(path: Path, row: dict[str, Any]) -> None:
    with Rows(path, settings=SETTINGS) as rows:
        rows.add(row)


def read(path: Path) -> list[dict[str, Any]]:
    with Rows(path, settings=SETTINGS) as rows:
        return rows.rows


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with Rows(path, settings=SETTINGS) as rows:
        with pytest.raises(BenchError, match="in use by another run"):
            Rows(path, settings=SETTINGS)
        rows.add({"n": 1})
    assert read(path) == [{"n": 1}]


def test_a_run_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    added(path, {"n": 1})
    assert read(path) == [{"n": 1}]
    added(path, {"n": 2, "text": "é\n\u2028\x85"})
    assert read(path) == [{"n": 1}, {"n": 2, "text": "é\n\u2028\x85"}]


@pytest.mark.parametrize("left", ['{"n": 2', "{", "\x00", '{"n": "é'])
def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path, left: str) -> None:
    path = tmp_path / "rows.jsonl"
    added(path, {"n": 1})
    with path.open("ab") as file:
        file.write(left.encode()[:-1] or b"{")
    added(path, {"n": 3})
    assert read(path) == [{"n": 1}, {"n": 3}]


def test_settings_that_were_cut_off_are_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"settings": {"se', encoding="utf-8")
    added(path, {"n": 1})
    assert read(path) == [{"n": 1}]


def test_rows_of_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    added(path, {"n": 1})
    before = path.read_bytes()
    with pytest.raises(BenchError, match=r"other settings \(seed\).*--out"):
        Rows(path, settings=SETTINGS | {"seed": 2})
    assert path.read_bytes() == before
    path.write_text('{"n": 1}\n', encoding="utf-8")
    with pytest.raises(BenchError, match="other settings"):
        Rows(path, settings=SETTINGS)
    path.write_text("no json\n", encoding="utf-8")
    with pytest.raises(BenchError, match="damaged"):
        Rows(path, settings=SETTINGS)
