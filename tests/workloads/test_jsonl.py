"""A user's own requests: what is written is read again, and what is wrong is named."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from rolling_kv.errors import ConfigError
from rolling_kv.workloads import LABELLED, LabelledRequest, TextSpan, read_requests, write_requests

GOOD = '{"documents": ["The door is red."], "query": "Which colour?"}'


def written(folder: Path, *lines: str) -> Path:
    path = folder / "requests.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", sorted(LABELLED))
def test_what_is_written_is_read_again(tmp_path: Path, name: str) -> None:
    requests = list(islice(LABELLED.create(name)(7, documents=8), 5))
    write_requests(tmp_path / "requests.jsonl", requests)
    assert list(read_requests(tmp_path / "requests.jsonl")) == requests


def test_text_of_any_script_and_with_line_breaks_is_kept(tmp_path: Path) -> None:
    text = "Zürich\nist 東京\u2028 \x85 nah"
    request = LabelledRequest(
        documents=(text,), query="Où?", answer_prefix="", expected="東京", spans=(TextSpan(0, 11, 13),)
    )
    write_requests(tmp_path / "requests.jsonl", [request])
    [read] = read_requests(tmp_path / "requests.jsonl")
    assert read == request
    assert read.text(read.spans[0]) == "東京"


def test_only_documents_and_query_are_required_and_empty_lines_are_skipped(tmp_path: Path) -> None:
    path = written(tmp_path, "", GOOD, "  ", GOOD, "")
    expected = LabelledRequest(("The door is red.",), "Which colour?", "", "", ())
    assert list(read_requests(path)) == [expected, expected]


def test_spans_move_with_the_text_when_it_is_stripped(tmp_path: Path) -> None:
    documents = ["plain", " \n\tThe door is red.\n"]
    start = documents[1].index("red")
    line = {"documents": documents, "query": "Which?", "spans": [[1, start, start + 3]]}
    [request] = read_requests(written(tmp_path, json.dumps(line)))
    assert request.documents == ("plain", "The door is red.")
    assert request.text(request.spans[0]) == "red"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"documents": []}, "documents"),
        ({"documents": ["red", 3]}, r"documents\.1"),
        ({"documents": ["red", " "]}, r"documents\[1\]: .*empty"),
        ({"query": None}, "query"),
        ({"query": " "}, "query is empty"),
        ({"answer": "red"}, "answer: Extra inputs"),
        ({"spans": [[0, 1]]}, r"spans\.0"),
        ({"spans": [[0, 1, "3"]]}, r"spans\.0\.2"),
        ({"spans": [[1, 0, 3]]}, "in no document"),
        ({"spans": [[0, 10, 40]]}, "does not lie inside its document of 16 characters"),
    ],
)
def test_an_error_names_file_line_and_field(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    path = written(tmp_path, GOOD, "", json.dumps(json.loads(GOOD) | change))
    requests = read_requests(path)
    assert next(requests).documents == ("The door is red.",)
    with pytest.raises(ConfigError, match=rf"requests\.jsonl, line 3: .*{named}"):
        next(requests)


@pytest.mark.parametrize("line", ["{", "[]", "red", '{"documents": ["\\ud800"], "query": "What?"}'])
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match=r"requests\.jsonl, line 1: "):
        next(read_requests(written(tmp_path, line)))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.jsonl cannot be read: "):
        next(read_requests(tmp_path / "absent.jsonl"))
    (tmp_path / "latin.jsonl").write_bytes(b'{"documents": ["\xe9"], "query": "Quoi ?"}')
    with pytest.raises(ConfigError, match=r"latin\.jsonl cannot be read: .*UTF-8"):
        next(read_requests(tmp_path / "latin.jsonl"))


def test_a_file_of_windows_is_read(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode() + b"\r\n" + GOOD.encode() + b"\r\n")
    assert len(list(read_requests(path))) == 2
