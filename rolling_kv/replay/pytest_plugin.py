"""What the pytest plugin does: records a test's sessions, replays them in other orders, and compares.

    @pytest.mark.replay_determinism(orders=("reversed", "random:1"), max_variation=0.0)
    def test_my_agent(rolling_replay):
        with rolling_replay.session(model="demo", window=8) as session:
            my_agent(session)

Every session that the test or its fixtures open is recorded, by whatever opens it, so an agent that opens its
own needs the marker alone. Each is replayed by itself, under its own settings and over its own engine, when the
test has passed; the test fails when answers depend on the order of requests. pytest calls this through the
package `pytest_rolling_kv`.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, Unpack

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from rolling_kv.hooks import observe_sessions
from rolling_kv.replay.groups import differing
from rolling_kv.replay.parting import TIE_TOLERANCE
from rolling_kv.replay.runs import CHRONOLOGICAL, Runs, is_faithful
from rolling_kv.replay.table import describe
from rolling_kv.replay.trace import Recorder, recorder_of
from rolling_kv.session import RollingSession

if TYPE_CHECKING:
    from rolling_kv.config import SessionConfig, SessionSettings
    from rolling_kv.engine.host import TransformersHost

SHOWN = 5
"""Differing requests of one session that a failure describes."""


class Options(BaseModel):
    """The arguments of the marker.

    Args:
        orders: compared with each other and with the chronological order, which is always among them.
        max_variation: the share of pairs of orders, over all requests of a session, that may differ.
        min_fidelity: the share of answers that must be full prefill's; None does not compare with it.
        protocol: as in `rolling-kv replay`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    orders: tuple[str, ...] = (CHRONOLOGICAL, "reversed", "random:0", "random:1")
    max_variation: float = Field(default=0.0, ge=0, le=1)
    min_fidelity: float | None = Field(default=None, ge=0, le=1)
    protocol: Literal["populate", "plain"] = "populate"

    @field_validator("orders", mode="before")
    @classmethod
    def _orders(cls, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
            raise ValueError("expected a tuple of names of orders")
        return tuple(dict.fromkeys((CHRONOLOGICAL, *value)))


@dataclass(frozen=True, slots=True)
class Recorded:
    """A session of the test."""

    path: Path
    engine: TransformersHost
    config: SessionConfig
    recorder: Recorder


class RollingReplay:
    """The fixture `rolling_replay`: opens sessions, and knows those that anything else opened.

    Args:
        options: of the marker.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self._recorded: list[Recorded] = []
        self._stack = ExitStack()

    def session(
        self, *, model: str | Path | TransformersHost = "demo", **settings: Unpack[SessionSettings]
    ) -> RollingSession:
        """`RollingSession.open`, with the arguments that it takes."""
        return RollingSession.open(model=model, **settings)

    def start(self) -> None:
        """Records every session that is opened from now on."""
        self.stop()
        folder = Path(self._stack.enter_context(TemporaryDirectory(prefix="rolling-replay-")))
        numbers = count()

        def opened(session: RollingSession) -> None:
            path = folder / f"session-{next(numbers)}.jsonl"
            recorder = recorder_of(session, path)
            self._stack.callback(recorder.close)
            self._recorded.append(Recorded(path, session.engine, session.config, recorder))

        self._stack.enter_context(observe_sessions(opened))

    def stop(self) -> None:
        """Records no more, and forgets what was recorded."""
        self._stack.close()
        self._recorded = []

    def check(self) -> None:
        """Replays what was recorded, and fails the test when answers depend on the order."""
        asked = [(one, requests) for one in self._recorded if (requests := one.requests())]
        if not any(len(requests) > 1 for _, requests in asked):
            total = sum(len(requests) for _, requests in asked)
            pytest.fail(
                f"There is nothing to replay: the test opened {len(self._recorded)} sessions of rolling_kv and "
                f"asked {total} requests. An order needs at least two requests to one session, opened by the "
                "test or its function-scoped fixtures.",
                pytrace=False,
            )
        problems = [
            problem
            for number, (one, requests) in enumerate(asked)
            if len(requests) > 1 and (problem := self._problem(number, one))
        ]
        if problems:
            pytest.fail("\n".join(problems), pytrace=False)

    def _problem(self, number: int, recorded: Recorded) -> str:
        """What is wrong with one session; empty when nothing is."""
        runs = replayed(recorded, self.options)
        arm = next(iter(runs.arms))
        pairs = [pair for _, found in runs.pairs(arm) for pair in found]
        differ = sum(one.token_ids != other.token_ids for one, other in pairs)
        lines = []
        if differ / len(pairs) > self.options.max_variation:
            lines.append(
                f"Answers depend on the order of requests: {differ} of {len(pairs)} pairs of orders differ "
                f"({differ / len(pairs):.3f}; max_variation={self.options.max_variation:g})."
            )
            lines += _partings(runs, arm)
        rows = runs.rows(arm)
        faithful = sum(is_faithful(row, runs.references[row.request]) for row in rows)
        if self.options.min_fidelity is not None and faithful / len(rows) < self.options.min_fidelity:
            lines.append(
                f"Answers are not full prefill's: {faithful} of {len(rows)} are "
                f"({faithful / len(rows):.3f}; min_fidelity={self.options.min_fidelity:g})."
            )
        if not lines:
            return ""
        config = recorded.config
        about = f"Session {number} ({recorded.engine.name}, {config.policy}, {config.conditioning})"
        orders = ", ".join(runs.orders(arm))
        return "\n".join((f"{about}, {len(runs.references)} requests replayed in the orders {orders}:", *lines))


def _partings(runs: Runs, arm: str) -> list[str]:
    """For the first of the differing requests, where each answer parts from the first."""
    found = differing(runs, arm, tolerance=TIE_TOLERANCE)
    lines = []
    for one in found[:SHOWN]:
        for answer in one.answers:
            if answer.parting is not None:
                lines.append("  " + describe(answer.parting).replace("\n", "\n  "))
    if len(found) > SHOWN:
        lines.append(f"  and {len(found) - SHOWN} more requests.")
    return lines


def prepare(item: pytest.Item, marker: pytest.Mark | None) -> None:
    """Has an item replay; `marker` holds the options, and None the default ones.

    Raises:
        pytest.UsageError: an argument is not as expected, or the item is no test function.
    """
    if not isinstance(item, pytest.Function) or isinstance(item, TestCaseFunction):
        raise pytest.UsageError(
            f"{item.nodeid}: {MARKER} works on test functions and methods of plain classes, not on this kind "
            f"of test ({type(item).__name__})."
        )
    item.stash[REPLAY] = RollingReplay(_options(item, marker))


def _options(item: pytest.Item, marker: pytest.Mark | None) -> Options:
    if marker is None:
        return Options()
    if marker.args:
        raise pytest.UsageError(f"{item.nodeid}: {MARKER} takes keyword arguments alone, and got {marker.args}.")
    try:
        options = Options(**marker.kwargs)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc']))} = {problem['input']!r}: {problem['msg']}"
            for problem in error.errors()
        )
        raise pytest.UsageError(
            f"{item.nodeid}: arguments of {MARKER} are not as expected: {problems}. It takes "
            f"{', '.join(Options.model_fields)}."
        ) from error
    return options
