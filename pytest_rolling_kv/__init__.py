"""A pytest plugin: tests that fail when an agent's answers depend on the order of its requests.

It stands beside `rolling_kv` so that pytest runs that do not use it need not import that. What it does is in
`rolling_kv.replay.pytest_plugin`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from rolling_kv.replay.pytest_plugin import RollingReplay

MARKER = "replay_determinism"
FIXTURE = "rolling_replay"
REPLAY: pytest.StashKey[RollingReplay] = pytest.StashKey()
"""Of an item that replays, set when it is collected."""

_ABOUT = (
    f"{MARKER}(orders, max_variation=0.0, min_fidelity=None, protocol='populate'): replays what sessions of "
    "rolling_kv were asked in the test, in other orders, and fails when answers depend on the order"
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _ABOUT)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker(MARKER)
        if marker is not None or FIXTURE in getattr(item, "fixturenames", ()):
            from rolling_kv.replay.pytest_plugin import prepare

            prepare(item, marker)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    replay = item.stash.get(REPLAY, None)
    if replay is not None:
        replay.start()  # before the fixtures, which may open sessions as well
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    result = yield
    replay = pyfuncitem.stash.get(REPLAY, None)
    if replay is not None:
        replay.check()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        replay = item.stash.get(REPLAY, None)
        if replay is not None:
            replay.stop()


@pytest.fixture(name=FIXTURE)
def rolling_replay(request: pytest.FixtureRequest) -> RollingReplay:
    """Records the sessions that the test opens, and replays them when it has run; see the marker
    `replay_determinism`."""
    replay: RollingReplay = request.node.stash[REPLAY]
    return replay
