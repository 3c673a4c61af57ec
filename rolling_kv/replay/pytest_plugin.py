"""What the pytest plugin does: records a test's sessions, replays them in other orders, and compares.

    @pytest.mark.replay_determinism(orders=("reversed", "random:1"), max_variation=0.0)
    def test_my_agent(rolling_replay):
        with rolling_replay.session(model="demo", window=8) as session:
            my_agent(session)

Every session that the test or its function-scoped fixtures open is recorded, by whatever opens it, so an
agent that opens its own needs the marker alone. When the test has passed, each is replayed by itself, under
its own settings and over its own engine, every order from an empty store in memory; the test fails when
answers depend on the order. pytest calls this through the package `pytest_rolling_kv`.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, Unpack
from unittest import TestCase

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from pytest_rolling_kv import MARKER, REPLAY
from rolling_kv.bench.arms import SESSION, parse_arms
from rolling_kv.config import DEFAULT_NAMESPACE
from rolling_kv.errors import ConfigError, RollingKVError
from rolling_kv.hooks import observe_sessions
from rolling_kv.replay.groups import differing
from rolling_kv.replay.history import History, history_of_traces
from rolling_kv.replay.orders import Order, parse_orders
from rolling_kv.replay.parting import TIE_TOLERANCE
from rolling_kv.replay.runner import ReplayRun, replay
from rolling_kv.replay.runs import CHRONOLOGICAL, Runs, is_faithful, runs_of
from rolling_kv.replay.table import describe
from rolling_kv.replay.trace import read_trace, recorder_of
from rolling_kv.session import RollingSession

if TYPE_CHECKING:
    from rolling_kv.config import SessionConfig, SessionSettings
    from rolling_kv.engine.host import TransformersHost

SHOWN = 5
"""Differing requests of one session that a failure describes."""


class Options(BaseModel):
    """The arguments of the marker.

    Args:
        orders: `reversed`, `random:<seed>`, compared with each other and with the chronological order, which
            is always among them.
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
        names = tuple(dict.fromkeys((CHRONOLOGICAL, *value)))
        try:
            _orders(names, requests=1)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return names


@dataclass(frozen=True, slots=True)
class Recorded:
    """A session of the test."""

    path: Path
    engine: TransformersHost
    config: SessionConfig

    @property
    def about(self) -> str:
        """Which one it is; chat models name a namespace after the agent's thread."""
        parts = [self.engine.name, self.config.policy, self.config.conditioning]
        if self.config.namespace != DEFAULT_NAMESPACE:
            parts.append(self.config.namespace)
        return ", ".join(parts)

    def history(self) -> History | None:
        """What it was asked; None when that is nothing."""
        recording = read_trace(self.path)
        return history_of_traces([recording]) if recording.requests else None


class RollingReplay:
    """The fixture `rolling_replay`: opens sessions, and knows those that anything else opened.

    Args:
        options: of the marker.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self._recorded: list[Recorded] = []
        self._kept = ExitStack()  # until the test is over
        self._recording = ExitStack()

    def session(
        self, *, model: str | Path | TransformersHost = "demo", **settings: Unpack[SessionSettings]
    ) -> RollingSession:
        """`RollingSession.open`, with the arguments that it takes."""
        return RollingSession.open(model=model, **settings)

    def start(self) -> None:
        """Records every session that is opened from now on."""
        self.stop()
        folder = Path(self._kept.enter_context(TemporaryDirectory(prefix="rolling-replay-")))
        numbers = count()

        def opened(session: RollingSession) -> None:
            path = folder / f"session-{next(numbers)}.jsonl"
            self._recording.callback(recorder_of(session, path).close)
            self._recorded.append(Recorded(path, session.engine, session.config))

        self._recording.enter_context(observe_sessions(opened))

    def stop(self) -> None:
        """Records no more, and forgets what was recorded."""
        self._recording.close()
        self._kept.close()
        self._recorded = []

    def check(self) -> None:
        """Replays what was recorded, and fails the test when answers depend on the order."""
        self._recording.close()
        try:
            problems = self._problems()
        except RollingKVError as error:
            pytest.fail(f"The test's sessions cannot be replayed: {error}", pytrace=False)
        if problems:
            pytest.fail("\n".join(problems), pytrace=False)

    def _problems(self) -> list[str]:
        asked = [(one, history) for one in self._recorded if (history := one.history()) is not None]
        ordered = [(one, history) for one, history in asked if len(history) > 1]
        if not ordered:
            return [
                "There is nothing to replay. Sessions of rolling_kv that the test opened: "
                f"{len(self._recorded)}; their answered requests: {sum(len(one) for _, one in asked)}. An "
                "order needs at least two requests to one session, which the test or its function-scoped "
                "fixtures open: sessions that were open before it are not recorded."
            ]
        return [problem for one, history in ordered if (problem := self._problem(one, history))]

    def _problem(self, recorded: Recorded, history: History) -> str:
        """What is wrong with one session; empty when nothing is."""
        orders = _orders(self.options.orders, requests=len(history))
        run = ReplayRun(parse_arms([SESSION]), orders, protocol=self.options.protocol)
        replayed = replay(recorded.engine, history, run)
        runs = runs_of(replayed.references, replayed.rows)
        rows = runs.rows(SESSION)
        reasons = sorted({reason for row in rows for reason in row.degraded})
        for reason in reasons:
            warnings.warn(f"The replay did not run as asked: {reason}", stacklevel=2)
        pairs = [pair for _, found in runs.pairs(SESSION) for pair in found]
        differ = sum(one.token_ids != other.token_ids for one, other in pairs)
        lines = []
        if differ / len(pairs) > self.options.max_variation:
            lines.append(
                f"Answers depend on the order of requests: {differ} of {len(pairs)} pairs of orders differ "
                f"({differ / len(pairs):.3f}; max_variation={self.options.max_variation:g})."
            )
            lines += _partings(runs)
            sampled = sum(request.sampled for request in history.requests)
            if sampled:
                lines.append(
                    f"{sampled} of {len(history)} requests were sampled, and are again, each with its "
                    "recorded seed: one draw of many is compared, and there margins do not tell a tie from "
                    "history."
                )
        faithful = sum(is_faithful(row, runs.references[row.request]) for row in rows)
        if self.options.min_fidelity is not None and faithful / len(rows) < self.options.min_fidelity:
            lines.append(
                f"Answers are not full prefill's: {faithful} of {len(rows)} are "
                f"({faithful / len(rows):.3f}; min_fidelity={self.options.min_fidelity:g})."
            )
        if not lines:
            return ""
        lines += [f"The replay did not run as asked: {reason}" for reason in reasons]
        names = ", ".join(order.name for order in orders)
        return "\n".join(
            (f"A session ({recorded.about}), {len(history)} requests in the orders {names}:", *lines)
        )


def _orders(names: tuple[str, ...], *, requests: int) -> tuple[Order, ...]:
    return parse_orders(",".join(names), count=requests)


def _partings(runs: Runs) -> list[str]:
    """For the first of the differing requests, where each answer parts from the first."""
    found = differing(runs, SESSION, tolerance=TIE_TOLERANCE)
    lines = [
        "  " + describe(answer.parting).replace("\n", "\n  ")
        for one in found[:SHOWN]
        for answer in one.answers
        if answer.parting is not None
    ]
    if len(found) > SHOWN:
        lines.append(f"  and {len(found) - SHOWN} more requests.")
    return lines


def prepare(item: pytest.Item, marker: pytest.Mark | None) -> None:
    """Has an item replay; `marker` holds the options, and None the default ones.

    Raises:
        pytest.UsageError: an argument is not as expected, or the item is no test function.
    """
    if not isinstance(item, pytest.Function) or (item.cls and issubclass(item.cls, TestCase)):
        raise pytest.UsageError(
            f"{item.nodeid}: {MARKER} works on test functions, and not on this {type(item).__name__}. Write "
            "the test as a function, or as a method of a plain class."
        )
    item.stash[REPLAY] = RollingReplay(_options(item, marker))


def _options(item: pytest.Item, marker: pytest.Mark | None) -> Options:
    if marker is None:
        return Options()
    if marker.args:
        raise pytest.UsageError(
            f"{item.nodeid}: {MARKER} takes keyword arguments alone, and got {marker.args}."
        )
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
