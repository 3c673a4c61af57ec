"""The frontier: how near to full prefill, for how much computation, over a window that rolls.

Answers are compared up to the token that makes full prefill's the expected one; by default only requests
that full prefill answers as expected are measured, and the window rolls past the others.

Every setting of how stored KV is made keeps a window of its own, which loses its oldest document and gains
one from request to request, so that what a slide and an append cost is what they cost an agent. Computation
is counted in multiplications (`bench.work`), conditioning, probes and deviations included, as a share of what
full prefill of the same prompt takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count, groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolling_kv.bench.cells import Cell
from rolling_kv.bench.conditions import conditions, digest_of
from rolling_kv.bench.fidelity import STOP, reference_of
from rolling_kv.bench.frontier_report import measured
from rolling_kv.bench.frontier_windows import STREAM, Bases, RollingWindow, by_setting
from rolling_kv.bench.rows import Rows
from rolling_kv.bench.work import Work
from rolling_kv.errors import BenchError, ConfigError
from rolling_kv.session import RollingSession
from rolling_kv.workloads import ROLLING, LabelledRequest

if TYPE_CHECKING:
    from rolling_kv.engine.host import TransformersHost

_CANDIDATES = 20  # requests for each that is to be measured, of which full prefill may answer many otherwise
_MORE = 3  # tokens than the expected answer, which tell it from the beginning of a longer one

Progress = Callable[[int, int], None]
"""Called with how many requests are done, of how many."""


@dataclass(frozen=True, slots=True)
class FrontierRun:
    """What is measured.

    Args:
        workload: one that rolls.
        documents: in the window.
        requests: that are measured.
        max_new_tokens: of full prefill's answer.
        seed: of the workload.
        answerable: only requests are measured that full prefill answers as expected.
        questions: that each window is asked.
    """

    cells: tuple[Cell, ...]
    workload: str
    documents: int
    requests: int
    max_new_tokens: int = 16
    seed: int = 0
    answerable: bool = True
    questions: int = 1

    def __post_init__(self) -> None:
        if self.workload not in ROLLING:
            raise ConfigError(
                f"The workload is {self.workload!r}; expected one that rolls: {', '.join(sorted(ROLLING))}."
            )
        for name in ("requests", "max_new_tokens", "questions"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected at least 1.")
        for cell in self.cells:
            if int(cell.setting.conditioning.partition("stream:")[2] or 0) >= STREAM:
                raise ConfigError(f"The cell is {cell.name}; expected stream:{STREAM - 1} at most.")


def run(
    engine: TransformersHost, plan: FrontierRun, *, rows_path: Path, progress: Progress
) -> list[dict[str, Any]]:
    """Measures what `rows_path` does not hold yet, and returns all rows, one a request.

    Raises:
        BenchError: full prefill answers hardly any request as expected.
    """
    windows = _windows(plan)
    first = next(windows)
    settings = {
        "kind": "frontier",
        "cells": [cell.name for cell in plan.cells],
        "workload": plan.workload,
        "documents": plan.documents,
        "questions": plan.questions,
        "max_new_tokens": plan.max_new_tokens,
        "seed": plan.seed,
        "answerable": plan.answerable,
        "requests_digest": digest_of({plan.workload: first}),
    }
    with Rows(rows_path, settings=settings | conditions(engine)) as rows, ExitStack() as opened:
        if len(measured(rows.rows)) < plan.requests:
            work = opened.enter_context(Work(engine))
            rolled = rows.rows[-1]["window"] + 1 if rows.rows else 0
            before = [window[0] for window in (first, *islice(windows, rolled + STREAM - 1))]
            bases = Bases(engine, plan.cells, before)
            rolling = [
                opened.enter_context(
                    RollingWindow(engine, work, setting, cells, before, base=bases.of(setting))
                )
                for setting, cells in by_setting(plan.cells).items()
            ]
            for index in count(rolled):
                done = len(measured(rows.rows))
                progress(done, plan.requests)
                if done >= plan.requests:
                    break
                if len(rows.rows) >= plan.requests * _CANDIDATES:
                    raise BenchError(
                        f"Full prefill answered {done} of {len(rows.rows)} requests as expected; "
                        f"{plan.requests} were to be measured. Pass --all, or another workload, --documents "
                        "or model."
                    )
                for row in _rows(engine, plan, rolling, next(windows), work=work, index=index):
                    rows.add(row)
        progress(plan.requests, plan.requests)
        return _up_to(rows.rows, plan.requests)


def _windows(plan: FrontierRun) -> Iterator[list[LabelledRequest]]:
    """The requests of one window after the other."""
    requests = ROLLING[plan.workload](plan.seed, documents=plan.documents, questions=plan.questions)
    for _, window in groupby(requests, key=attrgetter("documents")):
        yield list(window)


def _up_to(rows: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The rows as far as `count` of them are measured."""
    places = [place for place, row in enumerate(rows) if row["measured"]]
    return list(rows[: places[count - 1] + 1])


def _rows(
    engine: TransformersHost,
    plan: FrontierRun,
    windows: Sequence[RollingWindow],
    requests: Sequence[LabelledRequest],
    *,
    work: Work,
    index: int,
) -> Iterator[dict[str, Any]]:
    """One row a request; the first has what it took to roll the windows."""
    rolled = [window.roll(requests[0].documents[-1]) for window in windows]
    first = requests[0]
    with RollingSession.open(model=engine, instruction=first.instruction, ingest="lazy") as session:
        session.extend(first.documents)
        for number, (request, said) in enumerate(zip(requests, _said(engine, plan, requests), strict=True)):
            row = {"window": index, "number": number, "measured": False, "settings": []}
            if said is None:
                row |= _measured(engine, plan, windows, session, request, work=work, turn=index + number)
            else:
                row["full_prefill"] = {"text": said, "right": False}
            yield row | ({"rolled": _rolled(windows, rolled, request, work)} if not number else {})


def _said(
    engine: TransformersHost, plan: FrontierRun, requests: Sequence[LabelledRequest]
) -> Sequence[str | None]:
    """The wrong answers among those that one exact pass gives to several requests; None for the others.

    It finds those that are worth a full prefill each.
    """
    if len(requests) == 1 or not plan.answerable:
        return [None] * len(requests)
    found = []
    first = requests[0]
    with RollingSession.open(
        model=engine, instruction=first.instruction, conditioning="full", policy="direct-reuse", ingest="lazy"
    ) as session:
        session.extend(first.documents)
        for request in requests:
            longest = len(engine.tokenizer.encode(request.expected, special=False)) + _MORE
            answer = session.ask(
                request.query,
                answer_prefix=request.answer_prefix,
                max_new_tokens=min(longest, plan.max_new_tokens),
                stop=STOP,
            )
            found.append(None if request.is_right(answer.text) else answer.text)
    return found


def _rolled(
    windows: Sequence[RollingWindow],
    rolled: Sequence[dict[str, int]],
    request: LabelledRequest,
    work: Work,
) -> list[dict[str, Any]]:
    """What rolling took in each setting, as shares of full prefill of its prompt."""
    found = []
    for window, spent in zip(windows, rolled, strict=True):
        prompt = window.session.prompt_token_ids(request.query, answer_prefix=request.answer_prefix)
        full = work.of(len(prompt))
        found.append({part: counted / full for part, counted in spent.items()})
    return found


def _measured(
    engine: TransformersHost,
    plan: FrontierRun,
    windows: Sequence[RollingWindow],
    session: RollingSession,
    request: LabelledRequest,
    *,
    work: Work,
    turn: int,
) -> dict[str, Any]:
    """Full prefill's answer to a request, in `session`, and what each cell makes of it."""
    reference = reference_of(session, request, max_new_tokens=plan.max_new_tokens)
    taken = bool(reference.right) or not plan.answerable
    compared = reference.answer_only(request, engine.tokenizer.decode)
    settings = []
    for window in windows:
        own = compared
        if taken and len(window.session.documents) > plan.documents:  # a batch holds more
            own = reference_of(window.session, request, max_new_tokens=plan.max_new_tokens)
            own = own.answer_only(request, engine.tokenizer.decode)
        settings.append(
            {
                "setting": window.setting.name,
                "documents": len(window.session.documents),
                "full_ttft": own.ttft,
                "cells": window.outcomes(request, own, turn=turn) if taken else {},
            }
        )
    return {
        "prompt_tokens": reference.prompt_tokens,
        "measured": taken,
        "full_prefill": {
            "text": reference.text,
            "tokens": len(reference.token_ids),
            "compared": compared.compared,
            "least_margin": compared.least_margin,
            "right": reference.right,
            "ttft": reference.ttft,
        },
        "settings": settings,
    }
