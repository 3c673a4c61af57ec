"""The frontier: how near to full prefill, for how much computation, over a window that rolls.

Answers are compared up to the token that makes full prefill's the expected one; by default only requests
that full prefill answers as expected are measured, and the window rolls past the others.

Every setting of how stored KV is made keeps a window of its own, which loses its oldest document and gains
one from request to request, so that what a slide and an append cost is what they cost an agent. Computation
is counted in multiplications (`bench.work`), conditioning, probes and deviations included, as a share of what
full prefill of the same prompt takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rolling_kv.bench.cells import Cell, Setting
from rolling_kv.bench.conditions import conditions, digest_of
from rolling_kv.bench.fidelity import Reference, measure, reference_of
from rolling_kv.bench.layered import Layered
from rolling_kv.bench.requests import requests_of
from rolling_kv.bench.rows import Rows
from rolling_kv.bench.statistics import share_of
from rolling_kv.bench.work import Work
from rolling_kv.config import session_config
from rolling_kv.errors import BenchError, ConfigError
from rolling_kv.session import RollingSession
from rolling_kv.store import open_store
from rolling_kv.workloads import ROLLING, LabelledRequest

if TYPE_CHECKING:
    from rolling_kv.engine.host import TransformersHost
    from rolling_kv.store.base import KVStore

_MEMORY = 2 << 30  # bytes of stored KV for each setting: left edges wait there until they are needed
_CANDIDATES = 20  # requests for each that is to be measured, of which full prefill may answer many otherwise
_STREAM = 16  # documents before the first window, which stream:k has seen

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
    """

    cells: tuple[Cell, ...]
    workload: str
    documents: int
    requests: int
    max_new_tokens: int = 16
    seed: int = 0
    answerable: bool = True

    def __post_init__(self) -> None:
        if self.workload not in ROLLING:
            raise ConfigError(
                f"The workload is {self.workload!r}; expected one that rolls: {', '.join(sorted(ROLLING))}."
            )
        for name in ("requests", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected at least 1.")
        for cell in self.cells:
            if int(cell.setting.conditioning.partition("stream:")[2] or 0) >= _STREAM:
                raise ConfigError(f"The cell is {cell.name}; expected stream:{_STREAM - 1} at most.")


def run(
    engine: TransformersHost, plan: FrontierRun, *, rows_path: Path, progress: Progress
) -> list[dict[str, Any]]:
    """Measures what `rows_path` does not hold yet, and returns all rows, one a request.

    Raises:
        BenchError: full prefill answers hardly any request as expected.
    """
    documents = (plan.documents, plan.documents)
    count = plan.requests * (_CANDIDATES if plan.answerable else 1)
    requests = requests_of(plan.workload, seed=plan.seed, documents=documents, count=count + _STREAM)
    settings = {
        "kind": "frontier",
        "cells": [cell.name for cell in plan.cells],
        "workload": plan.workload,
        "documents": plan.documents,
        "max_new_tokens": plan.max_new_tokens,
        "seed": plan.seed,
        "answerable": plan.answerable,
        "requests_digest": digest_of({plan.workload: requests}),
    }
    with Rows(rows_path, settings=settings | conditions(engine)) as rows, ExitStack() as opened:
        done = len(measured(rows.rows))
        if done < plan.requests:
            work = opened.enter_context(Work(engine))
            rolled = len(rows.rows)
            before = requests[: rolled + _STREAM]
            bases = _Bases(engine, plan.cells, before)
            windows = [
                opened.enter_context(
                    _RollingWindow(engine, work, setting, cells, before, base=bases.of(setting))
                )
                for setting, cells in _by_setting(plan.cells).items()
            ]
            for index in range(rolled, count):
                progress(done, plan.requests)
                rows.add(_row(engine, plan, windows, requests[index + _STREAM], work=work, index=index))
                done = len(measured(rows.rows))
                if done == plan.requests:
                    break
            else:
                raise BenchError(
                    f"Full prefill answered {done} of {count} requests as expected; {plan.requests} were to "
                    "be measured. Pass --all, or another workload, --documents or model."
                )
        progress(plan.requests, plan.requests)
        return _up_to(rows.rows, plan.requests)


def _up_to(rows: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The rows as far as `count` of them are measured."""
    places = [place for place, row in enumerate(rows) if row["measured"]]
    return list(rows[: places[count - 1] + 1])


def measured(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those whose cells were measured; past the others the window rolled."""
    return [row for row in rows if row["measured"]]


def _by_setting(cells: Sequence[Cell]) -> dict[Setting, list[Cell]]:
    grouped: dict[Setting, list[Cell]] = {}
    for cell in cells:
        grouped.setdefault(cell.setting, []).append(cell)
    return grouped


class _Bases:
    """The KV of the window before the first request, made once for all settings that make it alike.

    The newest documents are left out, which some settings do not store.
    """

    def __init__(
        self, engine: TransformersHost, cells: Sequence[Cell], before: Sequence[LabelledRequest]
    ) -> None:
        self._engine = engine
        self._before = before
        self._anchored = {_alike(cell.setting) for cell in cells if cell.setting.anchors}
        self._fresh = max([1, *(cell.setting.fresh_tail for cell in cells)])
        self._stores: dict[Setting, KVStore] = {}

    def of(self, setting: Setting) -> KVStore:
        """A store that holds it; an empty one where a setting is exact and computes all it keeps."""
        if setting.exact:
            return open_store(None)
        alike = _alike(setting)
        if alike not in self._stores:
            made = replace(alike, anchors=alike in self._anchored)
            store = self._stores[alike] = open_store(None)
            with _session(self._engine, made, self._before, store=Layered(store, store)) as session:
                session.extend(_documents(made, self._before)[: -self._fresh])
        return self._stores[alike]


def _alike(setting: Setting) -> Setting:
    """What settings have in common whose KV is the same: fresh tail, anchors and idle time change none."""
    return replace(setting, fresh_tail=0, anchors=False, preroll="off")


def _documents(setting: Setting, before: Sequence[LabelledRequest]) -> list[str]:
    """Of the last request, behind those that left the window before it where the setting knows of them."""
    rolled = _STREAM - 1 if setting.conditioning.startswith("stream") else 0
    if setting.batch:  # as far as it would be, had it begun with the first request
        rolled = (len(before) - _STREAM) % setting.batch
    return [one.documents[0] for one in before[-1 - rolled : -1]] + list(before[-1].documents)


def _session(
    engine: TransformersHost, setting: Setting, before: Sequence[LabelledRequest], *, store: KVStore
) -> RollingSession:
    config = session_config(
        instruction=before[0].instruction,
        deterministic=False,
        **setting.session_settings(documents=len(before[0].documents)),
    )
    return RollingSession(engine=engine, store=store, config=config)


class _RollingWindow:
    """The window of one setting, as it was before the next request.

    Args:
        cells: of the setting.
        before: the requests that came before the next one, at least `_STREAM`.
        base: holds what is stored before the window rolls; it is not written to.
    """

    def __init__(
        self,
        engine: TransformersHost,
        work: Work,
        setting: Setting,
        cells: Sequence[Cell],
        before: Sequence[LabelledRequest],
        *,
        base: KVStore,
    ) -> None:
        self.setting = setting
        self.cells = cells
        self._work = work
        store = Layered(base, open_store(None, memory_limit=_MEMORY))
        self.session = _session(engine, setting, before, store=store)
        self.session.extend(_documents(setting, before))
        if not setting.batch:
            for document in self.session.documents[: -len(before[0].documents)]:
                self.session.evict(document.id)

    def __enter__(self) -> _RollingWindow:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.session.close()

    def roll(self, text: str) -> dict[str, int]:
        """Rolls the window by one document; the multiplications that it took."""
        spent = {"idle": 0, "slide": 0}
        if self.setting.preroll != "off":
            spent["idle"] = self._work.during(self.session.preroll)
        elif not self.setting.batch:
            oldest = self.session.documents[0].id
            spent["slide"] = self._work.during(lambda: self.session.evict(oldest))
        spent["append"] = self._work.during(lambda: self.session.append(text))
        if self.setting.batch:  # the new document's pass is the last; the slide's came before it
            spent |= {"append": self._work.last, "slide": spent["append"] - self._work.last}
        return spent

    def outcomes(
        self, request: LabelledRequest, reference: Reference, *, turn: int
    ) -> dict[str, dict[str, Any]]:
        """What each cell makes of the request; the cells take turns at being first."""
        found = {}
        first = turn % len(self.cells)
        full = self._work.of(reference.prompt_tokens)
        scored = self._work.of(len(reference.token_ids), behind=reference.prompt_tokens)
        for cell in (*self.cells[first:], *self.cells[:first]):
            before = self._work.counted
            outcome = measure(self.session, request, reference, cell.arm, stats=False)
            counted = self._work.counted - before - scored
            found[cell.name] = asdict(cell.arm) | outcome.to_dict() | {"ask": counted / full}
        return {cell.name: found[cell.name] for cell in self.cells}


def _row(
    engine: TransformersHost,
    plan: FrontierRun,
    windows: Sequence[_RollingWindow],
    request: LabelledRequest,
    *,
    work: Work,
    index: int,
) -> dict[str, Any]:
    rolled = [window.roll(request.documents[-1]) for window in windows]
    with RollingSession.open(model=engine, instruction=request.instruction, ingest="lazy") as session:
        session.extend(request.documents)
        reference = reference_of(session, request, max_new_tokens=plan.max_new_tokens)
    taken = bool(reference.right) or not plan.answerable
    compared = reference.answer_only(request, engine.tokenizer.decode)
    settings = []
    for window, spent in zip(windows, rolled, strict=True):
        own = compared
        if taken and len(window.session.documents) > plan.documents:  # a batch holds more
            own = reference_of(window.session, request, max_new_tokens=plan.max_new_tokens)
            own = own.answer_only(request, engine.tokenizer.decode)
        prompt = window.session.prompt_token_ids(request.query, answer_prefix=request.answer_prefix)
        full = work.of(len(prompt))
        settings.append(
            {
                "setting": window.setting.name,
                "documents": len(window.session.documents),
                "work": {part: counted / full for part, counted in spent.items()},
                "full_ttft": own.ttft,
                "cells": window.outcomes(request, own, turn=index) if taken else {},
            }
        )
    return {
        "request": index,
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


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry a cell; shares of computation are means, those of rolling over all requests."""
    taken = measured(rows)
    entries = []
    for place, setting in enumerate(taken[0]["settings"]):
        rolled = [row["settings"][place]["work"] for row in rows]
        work = {part: fmean(one[part] for one in rolled) for part in ("idle", "append", "slide")}
        entries += [_entry(taken, place, cell, work) for cell in setting["cells"]]
    return entries


def _entry(
    rows: Sequence[dict[str, Any]], place: int, name: str, rolling: dict[str, float]
) -> dict[str, Any]:
    own = [row["settings"][place] for row in rows]
    cells = [one["cells"][name] for one in own]
    right = [cell["agrees"] for cell, row in zip(cells, rows, strict=True) if row["full_prefill"]["right"]]
    work = rolling | {"ask": fmean(cell["ask"] for cell in cells)}
    return {
        "cell": name,
        "setting": own[0]["setting"],
        "policy": cells[0]["policy"],
        "ratio": cells[0]["ratio"],
        "requests": len(rows),
        "answer_agreement": asdict(share_of([cell["agrees"] for cell in cells])),
        "agreement_where_right": asdict(share_of(right)) if right else None,
        "top1": fmean(cell["top1"] for cell in cells),
        "kl": fmean(cell["kl"] for cell in cells),
        "work": work | {"slide_and_ask": work["slide"] + work["ask"]},
        "ttft_seconds": median(cell["ttft"] for cell in cells),
        "speedup": median(one["full_ttft"] / cell["ttft"] for one, cell in zip(own, cells, strict=True)),
        "degraded": sorted({reason for cell in cells for reason in cell["degraded"]}),
    }


def best(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cells that no other beats: none agrees as often for as little computation at slide and ask."""

    def beats(one: dict[str, Any], other: dict[str, Any]) -> bool:
        more = one["answer_agreement"]["share"] - other["answer_agreement"]["share"]
        less = other["work"]["slide_and_ask"] - one["work"]["slide_and_ask"]
        return bool(more >= 0 and less >= 0 and (more > 0 or less > 0))

    return [entry for entry in entries if not any(beats(other, entry) for other in entries)]


def markdown(entries: Sequence[dict[str, Any]]) -> str:
    """A table of the cells, those that agree most often first."""
    lines = [
        "| cell | equal to full prefill (95%) | top-1 | KL | idle | append | slide | ask | sooner |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    unbeaten = [entry["cell"] for entry in best(entries)]
    for entry in sorted(entries, key=lambda entry: -entry["answer_agreement"]["share"]):
        agreement, work = entry["answer_agreement"], entry["work"]
        name = f"**`{entry['cell']}`**" if entry["cell"] in unbeaten else f"`{entry['cell']}`"
        shares = " | ".join(f"{100 * work[part]:.1f}%" for part in ("idle", "append", "slide", "ask"))
        lines.append(
            f"| {name} | {agreement['share']:.2f} ({agreement['low']:.2f} to {agreement['high']:.2f}) | "
            f"{entry['top1']:.2f} | {entry['kl']:.3f} | {shares} | {entry['speedup']:.1f}x |"
        )
    return "\n".join(lines)
