"""Names of orders and arms: what they mean, and what is said of those that mean nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolling_kv.bench.arms import Arm, parse_arm, parse_arms
from rolling_kv.bench.remaining import Remaining
from rolling_kv.errors import (
    ConfigError,
    InvalidRatioError,
    UnknownConditioningError,
    UnknownPolicyError,
)
from rolling_kv.replay.orders import Order, parse_orders


def test_a_number_of_orders_is_chronological_reversed_and_random() -> None:
    orders = parse_orders("5", count=20, seed=7)
    assert [order.name for order in orders] == (
        ["chronological", "reversed", "random:7", "random:8", "random:9"]
    )
    assert orders[0].requests == tuple(range(20))
    assert orders[1].requests == tuple(range(19, -1, -1))
    assert len({order.requests for order in orders}) == 5
    assert [order.name for order in parse_orders("1", count=3)] == ["chronological"]
    assert parse_orders("random:8", count=20)[0] == orders[3]


@given(st.integers(1, 60), st.integers(-5, 5))
def test_every_order_holds_every_request_once(count: int, seed: int) -> None:
    for order in parse_orders(f"chronological,reversed,random:{seed}", count=count):
        assert sorted(order.requests) == list(range(count))


def test_an_order_of_the_users_own(tmp_path: Path) -> None:
    listed, plain = tmp_path / "a.json", tmp_path / "b.txt"
    listed.write_text("[2, 0]")
    plain.write_text("2\n0\n")
    first, second = parse_orders(f"{listed}, {plain}", count=3)
    assert first.requests == second.requests == (2, 0)
    assert first.name.startswith("a-")
    listed.write_text("[0, 2]")
    assert parse_orders(str(listed), count=3)[0].name != first.name, "rows of another order are not its own"
    assert Order.of("mine", [1], count=2) == Order("mine", (1,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "at least 1"),
        ("sideways", "Unknown order 'sideways'. Expected chronological, reversed, random:<seed>, or a file"),
        ("chronological,,reversed", "Unknown order ''"),
        ("random", "Unknown order 'random'"),
        ("random:x", "Unknown order"),
        ("repeat", "Controls have an option of their own"),
        ("reversed, reversed", "named twice"),
        ("-3", "Unknown order"),
    ],
)
def test_orders_that_are_none(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_orders(text, count=4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("0 4", "names the request 4; expected 0 to 3"),
        ("0 1 0", "one of them twice"),
        ("", "holds no request"),
        ("one two", "lists no request numbers"),
        ("[true]", "names the request True"),
        ("[0, 1", "lists no request numbers"),
        ('["0"]', "names the request '0'"),
    ],
)
def test_files_that_list_no_order(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "order.txt"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        parse_orders(str(path), count=4)
    with pytest.raises(ConfigError, match="the name of a control"):
        Order.of("repeat", [0], count=4)


@pytest.mark.parametrize(
    ("text", "name", "parts"),
    [
        (
            "direct-reuse:window:8+tail1",
            "direct-reuse:window:8+tail1",
            ("direct-reuse", None, "window:8", 1),
        ),
        ("token-topk+tail2", "token-topk@0.05:window:8+tail2", ("token-topk", 0.05, "window:8", 2)),
        ("token-topk:first-seen", "token-topk@0.05:first-seen", ("token-topk", 0.05, "first-seen")),
        ("document-aligned", "document-aligned@0.05:window:8", ("document-aligned", 0.05, "window:8")),
        ("document-aligned@.2", "document-aligned@0.2:window:8", ("document-aligned", 0.2, "window:8")),
        (
            "sink-repair:document-aligned@0.1:window:3",
            "sink-repair:document-aligned@0.1:window:3",
            ("sink-repair:document-aligned", 0.1, "window:3"),
        ),
        (
            "sink-repair:qcfuse-spans:isolated",
            "sink-repair:qcfuse-spans@0.05:isolated",
            ("sink-repair:qcfuse-spans", 0.05, "isolated"),
        ),
        ("sink-repair:window:3", "sink-repair@0.05:window:3", ("sink-repair", 0.05, "window:3")),
        ("direct-reuse:stream:2", "direct-reuse:stream:2", ("direct-reuse", None, "stream:2")),
        (" full-prefill ", "full-prefill", ("full-prefill", None, None)),
        ("session", "session", (None, None, None)),
    ],
)
def test_an_arm_is_policy_ratio_and_conditioning(text: str, name: str, parts: tuple[Any, ...]) -> None:
    arm = parse_arm(text)
    assert arm == Arm(*parts)
    assert arm.name == name
    assert parse_arm(name) == arm


def test_arms_without_a_ratio_take_the_given_one() -> None:
    assert [arm.ratio for arm in parse_arms(["token-topk", "epic@0.3"], ratio=0.2)] == [0.2, 0.3]
    assert Arm("token-topk", 0.1, "first-seen").settings()["deterministic"] is False
    assert Arm("token-topk", 0.1, "window:2").settings()["deterministic"] is True
    assert Arm("token-topk", 0.1, "window:2", 1).settings()["fresh_tail"] == 1


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", UnknownPolicyError, "The arm '' is not as expected: Unknown recompute policy ''"),
        ("topk", UnknownPolicyError, "Known ones: .*token-topk.* An arm is policy"),
        ("token-topk@1.5", InvalidRatioError, "ratio is 1.5"),
        ("token-topk@half:isolated", InvalidRatioError, "ratio is 'half'"),
        ("token-topk@nan", InvalidRatioError, "ratio is nan"),
        ("token-topk@", InvalidRatioError, "ratio is ''"),
        ("token-topk:windows", UnknownConditioningError, "Unknown conditioning 'windows'"),
        ("token-topk:isolated@0.1", UnknownPolicyError, "policy .isolated.*An arm is policy.@ratio..:cond"),
        ("full-prefill@0.1", ConfigError, "takes no ratio, conditioning or fresh tail"),
        ("full-prefill:isolated", ConfigError, "takes no ratio, conditioning or fresh tail"),
        ("full-prefill+tail1", ConfigError, "takes no ratio, conditioning or fresh tail"),
        ("token-topk:isolated+tail0", UnknownConditioningError, r"Unknown conditioning 'isolated\+tail0'"),
        ("direct-reuse@0.1", ConfigError, "takes no ratio"),
        ("qcfuse:first-seen", ConfigError, "qcfuse needs anchors"),
        ("session:isolated", UnknownPolicyError, "session"),
    ],
)
def test_arms_that_are_none(text: str, error: type[ConfigError], message: str) -> None:
    with pytest.raises(error, match=message):
        parse_arm(text)


def test_an_arm_is_named_once() -> None:
    with pytest.raises(ConfigError, match=r"'token-topk@0\.05:window:8' is named twice"):
        parse_arms(["token-topk", "full-prefill", "token-topk@0.05:window:8"])
    with pytest.raises(ConfigError, match="no arm"):
        parse_arms([])


def test_what_is_left_is_estimated_by_kind() -> None:
    now = 0.0
    left = Remaining(lambda: now)
    left.expect("slow", 3)
    left.expect("fast", 10)
    assert left.estimate() == ""
    now = 60.0
    left.took("slow")
    assert (left.done, left.total, left.seconds()) == (1, 13, 12 * 60)
    now = 61.0
    left.took("fast")
    assert left.seconds() == 2 * 60 + 9
    now = 100.0
    left.begin()
    now = 101.0
    left.took("fast")
    assert left.seconds() == 2 * 60 + 8
    assert left.estimate() == "2 min"
    for _ in range(2):
        left.took("slow")
    assert left.estimate() == "8 s"
    left.expect("slow", 1000)
    assert left.estimate() == "5.6 h"
