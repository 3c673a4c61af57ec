"""A user's own labelled requests: JSON lines, one request a line.

    {"documents": ["On 4 March ..."], "query": "What ...?", "answer_prefix": "", "expected": "518.55",
     "instruction": "", "spans": [[0, 32, 38]]}

Only `documents` and `query` are required. A span is [document, start, stop]: characters of the text as it
stands in the file, `stop` exclusive.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rolling_kv.errors import ConfigError, RollingKVError
from rolling_kv.workloads.request import LabelledRequest, TextSpan


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    documents: Annotated[list[str], Field(min_length=1)]
    query: str
    answer_prefix: str = ""
    expected: str = ""
    instruction: str = ""
    spans: list[Annotated[list[int], Field(min_length=3, max_length=3)]] = []

    def request(self) -> LabelledRequest:
        """The request with its documents stripped, and its spans moved by what went from the beginning."""
        led = [len(text) - len(text.lstrip()) for text in self.documents]
        spans = []
        for document, start, stop in self.spans:
            shift = led[document] if 0 <= document < len(led) else 0
            spans.append(TextSpan(document, start - shift, stop - shift))
        return LabelledRequest(
            documents=tuple(text.strip() for text in self.documents),
            query=self.query,
            answer_prefix=self.answer_prefix,
            expected=self.expected,
            spans=tuple(spans),
            instruction=self.instruction,
        )


def read_requests(path: str | Path) -> Iterator[LabelledRequest]:
    """The requests of a file in its order, read as they are asked for. Empty lines are skipped.

    White space around a document is not part of it; spans move with the text.

    Raises:
        ConfigError: the file cannot be read, or a line is not a request; it names file, line and field.
    """
    try:
        with Path(path).open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parsed(line, where=f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Expected JSON lines in UTF-8.") from error


def _parsed(line: str, *, where: str) -> LabelledRequest:
    try:
        return _Line.model_validate_json(line).request()
    except ValidationError as error:
        problems = "; ".join(_problem(problem["loc"], problem["msg"]) for problem in error.errors())
        raise ConfigError(
            f"{where}: {problems}. Expected one JSON object a line with documents (a list of texts) and "
            "query, and perhaps answer_prefix, expected, instruction and spans ([[document, start, stop]])."
        ) from error
    except RollingKVError as error:
        raise ConfigError(f"{where}: {error}") from error


def _problem(place: tuple[int | str, ...], message: str) -> str:
    field = ".".join(str(part) for part in place)
    return f"{field}: {message}" if field else message


def write_requests(path: str | Path, requests: Iterable[LabelledRequest]) -> None:
    """Writes `requests` as `read_requests` reads them, over what the file held."""
    with Path(path).open("w", encoding="utf-8", newline="\n") as file:
        for request in requests:
            line = {
                "documents": request.documents,
                "query": request.query,
                "answer_prefix": request.answer_prefix,
                "expected": request.expected,
                "instruction": request.instruction,
                "spans": [[span.document, span.start, span.stop] for span in request.spans],
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
