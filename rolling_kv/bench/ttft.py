"""Time to the first token over a rolling window, beside the stock forward of transformers."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolling_kv.answer import Answer
from rolling_kv.bench.conditions import conditions
from rolling_kv.bench.memory import PeakMemory, anonymous_bytes
from rolling_kv.bench.remaining import Remaining
from rolling_kv.bench.rows import Rows
from rolling_kv.bench.ttft_arms import TtftArm
from rolling_kv.bench.ttft_setups import SETUPS, Base
from rolling_kv.bench.work import Work
from rolling_kv.config import session_config
from rolling_kv.errors import PromptTooLongError
from rolling_kv.policies import create_policy
from rolling_kv.session import RollingSession
from rolling_kv.workloads.market import INSTRUCTION, Detail, MarketEvent, copy_question, market_events

if TYPE_CHECKING:
    from rolling_kv.bench.llama_cpp import LlamaCpp
    from rolling_kv.engine.host import TransformersHost

FULL = "full-prefill"
LLAMA_CPP = "llama.cpp"
PHASES = ("ingest", "load", "select", "fuse", "first_token")

Side = tuple[str, Callable[[], dict[str, Any]]]

Progress = Callable[[str, float], None]
"""Called with what comes next and how long the run still takes, and the fraction that is done."""


@dataclass(frozen=True, slots=True)
class TtftRun:
    """What is measured.

    Args:
        windows: documents.
        requests: of each window; one more comes first, warms up and is not timed: in it memory is measured
            and computation counted.
        setups: names in `SETUPS`.
        detail: of the market events.
        seed: of the events.
        memory: whether memory is measured.
    """

    windows: tuple[int, ...]
    arms: tuple[TtftArm, ...]
    setups: tuple[str, ...]
    requests: int = 5
    detail: Detail = "long"
    seed: int = 0
    memory: bool = True


def run(
    engine: TransformersHost,
    plan: TtftRun,
    *,
    rows_path: Path,
    progress: Progress,
    llama: LlamaCpp | None = None,
    before_model: int = 0,
) -> list[dict[str, Any]]:
    """Measures what `rows_path` does not hold yet, and returns all rows, one a window and request.

    Args:
        before_model: anonymous bytes of the process before the model was loaded.
    """
    settings = asdict(plan) | {"kind": "ttft", "arms": [arm.name for arm in plan.arms]}
    settings |= {"llama_cpp": None if llama is None else llama.name} | conditions(engine)
    with Rows(rows_path, settings=settings) as rows:
        _measure_left(engine, plan, rows, progress=progress, llama=llama, before_model=before_model)
        return rows.rows


def _measure_left(
    engine: TransformersHost,
    plan: TtftRun,
    rows: Rows,
    *,
    progress: Progress,
    llama: LlamaCpp | None,
    before_model: int,
) -> None:
    done = {(row["window"], row["request"]) for row in rows.rows}
    left = {}
    for window in plan.windows:
        numbers = [number for number in range(plan.requests + 1) if (window, number) not in done]
        if numbers:  # a process that goes on has not warmed up, either
            left[window] = numbers if numbers[0] == 0 else [0, *numbers]
    remaining = Remaining(time.perf_counter)
    for window, numbers in left.items():
        remaining.expect(f"{window}", len(numbers))
    for window, numbers in left.items():
        with _Window(engine, plan, window, llama=llama, before_model=before_model) as measured:
            for number in numbers:

                def report(what: str, called: str = f"{window} documents, {_called(number)}") -> None:
                    estimate = remaining.estimate()
                    text = f"{called}, {what}" + (f", {estimate} left" if estimate else "")
                    progress(text, remaining.done / remaining.total)

                row = measured.row(number, progress=report)
                if (window, number) not in done:
                    rows.add(row)
                remaining.took(f"{window}")
    progress("done", 1.0)


def _called(number: int) -> str:
    return f"request {number}" if number else "warming up"


class _Window:
    """Requests over a window of one size."""

    def __init__(
        self,
        engine: TransformersHost,
        plan: TtftRun,
        window: int,
        *,
        llama: LlamaCpp | None,
        before_model: int,
    ) -> None:
        self._engine = engine
        self._plan = plan
        self._window = window
        self._llama = llama
        self._before_model = before_model
        events = market_events(plan.seed, detail=plan.detail)
        self._events = list(islice(events, window + plan.requests + 1))
        self._stack = ExitStack()
        self._bases: dict[tuple[str, int, bool], Base] = {}

    def __enter__(self) -> _Window:
        anchored = any(
            need.signal == "anchors" for arm in self._plan.arms for need in create_policy(arm.policy).needs
        )
        for conditioning, tail in dict.fromkeys(
            (arm.conditioning, arm.fresh_tail) for arm in self._plan.arms
        ):
            for disk in sorted({SETUPS[name].disk for name in self._plan.setups}):
                config = session_config(
                    instruction=INSTRUCTION,
                    window=self._window,
                    conditioning=conditioning,
                    fresh_tail=tail,
                    policy="qcfuse" if anchored else "document-aligned",
                )
                base = self._bases[conditioning, tail, disk] = Base(self._engine, config, disk=disk)
                self._stack.callback(base.close)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def row(self, number: int, *, progress: Callable[[str], None]) -> dict[str, Any]:
        """Rolls the window by one document and asks, by each arm in each setup and by the stock forward."""
        before = [event.text for event in self._events[number : number + self._window]]
        now = self._events[number + 1 : number + 1 + self._window]
        for (conditioning, _, disk), base in self._bases.items():
            place = f"KV under {conditioning} {'on disk' if disk else 'in memory'}"
            base.hold(before, progress=lambda done, of, place=place: progress(f"{place}: {done} of {of}"))
        question = copy_question(now, seed=self._plan.seed, step=number)
        sides: list[Side] = [
            (
                f"{arm.name} {name}",
                partial(self._arm, arm, name, before, now[-1], question, untimed=not number),
            )
            for arm in self._plan.arms
            for name in self._setups(number)
        ]
        full: list[Side] = [(FULL, partial(self._full, now, question, untimed=not number))]
        if self._llama is not None:
            full.append((LLAMA_CPP, partial(self._llama_cpp, now, question)))
        names = [name for name, _ in (*full, *sides)]
        turn = number % max(1, len(sides))
        sides = sides[turn:] + sides[:turn]
        ordered = [*full, *sides] if number % 2 else [*sides, *reversed(full)]  # in turns the first
        found = {}
        for name, measure in ordered:
            progress(name)
            gc.collect()
            found[name] = measure()
        return {
            "window": self._window,
            "request": number,
            "order": [name for name, _ in ordered],
            "prompt_tokens": found[FULL]["prompt_tokens"],
            "measured": {name: found[name] for name in names},
            "loading": [base.loading(before) for base in self._bases.values() if base.disk][:1],
        }

    def _setups(self, number: int) -> list[str]:
        """A cold store costs as much as a full prefill, so it is measured once a window."""
        return [name for name in self._plan.setups if not SETUPS[name].empty or number == 1]

    def _arm(
        self,
        arm: TtftArm,
        name: str,
        before: Sequence[str],
        new: MarketEvent,
        question: Any,
        *,
        untimed: bool,
    ) -> dict[str, Any]:
        setup = SETUPS[name]
        with self._bases[arm.conditioning, arm.fresh_tail, setup.disk].session(setup, before) as session:
            paid = {"idle_seconds": 0.0, "idle_computed": 0}
            started = time.perf_counter()
            if setup.idle:
                ahead = session.preroll().computed
                paid = {"idle_seconds": time.perf_counter() - started, "idle_computed": ahead}
                started = time.perf_counter()
            session.append(new.text, id=new.id)
            paid["append_seconds"] = time.perf_counter() - started
            found = self._asked(session, question, untimed=untimed, **arm.options())
        return found | {"arm": arm.name, "setup": name} | paid

    def _full(self, now: Sequence[MarketEvent], question: Any, *, untimed: bool) -> dict[str, Any]:
        with RollingSession.open(model=self._engine, instruction=INSTRUCTION, ingest="lazy") as session:
            session.extend([event.text for event in now])
            return self._asked(session, question, untimed=untimed, policy=FULL)

    def _llama_cpp(self, now: Sequence[MarketEvent], question: Any) -> dict[str, Any]:
        assert self._llama is not None
        with RollingSession.open(model=self._engine, instruction=INSTRUCTION, ingest="lazy") as session:
            session.extend([event.text for event in now])
            ids = session.prompt_token_ids(question.query, answer_prefix=question.answer_prefix)
        return {"ttft": self._llama.ttft(ids), "prompt_tokens": len(ids)}

    def _asked(
        self, session: RollingSession, question: Any, *, untimed: bool, **options: Any
    ) -> dict[str, Any]:
        asked = {"answer_prefix": question.answer_prefix, "max_new_tokens": 1, **options}
        watched: dict[str, Any] = {}
        if untimed:
            answer, watched = self._watched(lambda: session.ask(question.query, **asked))
        else:
            answer = session.ask(question.query, **asked)
        timing, usage = answer.timing, answer.usage
        return {
            "ttft": timing.ttft,
            "phases": {name: getattr(timing, name) for name in PHASES},
            "prompt_tokens": usage.prompt_tokens,
            "recomputed": usage.recomputed,
            "computed": usage.computed,
            "ingested": usage.ingested,
            "segments": answer.trace.selection.segments,
            "kv_bytes_moved": (usage.prompt_tokens - usage.computed) * self._engine.kv_bytes_per_token,
            "first_token": answer.token_ids[0] if answer.token_ids else None,
            "degraded": list(usage.degraded),
        } | watched

    def _watched(self, ask: Callable[[], Answer]) -> tuple[Answer, dict[str, Any]]:
        """Asks; and the memory and computation that it took, both of which cost time to look at."""
        with Work(self._engine) as work, ExitStack() as looking:
            at_start = anonymous_bytes() if self._plan.memory else 0
            peak = looking.enter_context(PeakMemory()) if self._plan.memory else None
            answer = ask()
        memory = peak and {"before_model": self._before_model, "at_start": at_start, "peak": peak.peak}
        return answer, {"memory": memory, "multiplications": work.counted}


def require_fitting(engine: TransformersHost, plan: TtftRun) -> None:
    """Checks that the prompts of every window fit into the model, before anything is measured.

    Raises:
        PromptTooLongError: names the first window that does not fit.
    """
    for window in plan.windows:
        events = list(islice(market_events(plan.seed, detail=plan.detail), window + plan.requests + 1))
        with RollingSession.open(model=engine, instruction=INSTRUCTION, ingest="lazy") as session:
            session.extend([event.text for event in sorted(events, key=lambda e: -len(e.text))[:window]])
            longest = len(session.prompt_token_ids("Which number stands there? " * 8)) + 1
        if longest > engine.max_positions:
            raise PromptTooLongError(
                f"--window {window} with --detail {plan.detail} gives prompts of up to {longest} tokens, and "
                f"{engine.name!r} has {engine.max_positions} positions. Leave that window out, or pass "
                "--detail short."
            )
