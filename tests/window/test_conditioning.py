"""Conditioning: which segments a segment is computed after, and what follows for the plan."""

from __future__ import annotations

import pytest

from rolling_kv.errors import UnknownConditioningError
from rolling_kv.kv import ModelIdentity
from rolling_kv.plan import Plan, make_plan
from rolling_kv.store import make_lineage
from rolling_kv.window import Prompt, Segment, parse_conditioning

IDENTITY = ModelIdentity(name="m", model="1", tokenizer="2", rope="3", dtype="float32", device="cpu")


def prompt(*, instruction: bool = True, documents: int = 5) -> Prompt:
    """Segments of 2 (instruction), 10, 11, 12, ... (documents) and 3 (query) tokens."""
    lengths = [("instruction", 2)] if instruction else []
    lengths += [("document", 10 + number) for number in range(documents)] + [("query", 3)]
    segments, start = [], 0
    for number, (kind, length) in enumerate(lengths):
        ids = (number,) * length
        segments.append(Segment(kind=kind, name=f"{kind}{number}", token_ids=ids, start=start))  # type: ignore[arg-type]
        start += length
    return Prompt(segments=tuple(segments))


def plan(mode: str, **shape: bool | int) -> Plan:
    return make_plan(
        prompt(**shape),  # type: ignore[arg-type]
        conditioning=parse_conditioning(mode),
        lineage_of=lambda path, *, gap=0: make_lineage(IDENTITY, namespace="n", path=path, gap=gap),
    )


@pytest.mark.parametrize(
    ("mode", "seen"),
    [
        ("isolated", [(), (), (), (), (), ()]),
        ("instruction", [(), (0,), (0,), (0,), (0,), (0,)]),
        ("window:1", [(), (0,), (0, 1), (0, 2), (0, 3), (0, 4)]),
        ("window:3", [(), (0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 2, 3, 4)]),
        ("window:99", [(), (0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 1, 2, 3, 4)]),
    ],
)
def test_what_each_segment_sees(mode: str, seen: list[tuple[int, ...]]) -> None:
    context = prompt().context
    conditioning = parse_conditioning(mode)
    assert [conditioning.context(context, index) for index in range(6)] == seen


def test_without_an_instruction_only_neighbours_are_seen() -> None:
    context = prompt(instruction=False).context
    conditioning = parse_conditioning("window:2")
    assert [conditioning.context(context, index) for index in range(5)] == [(), (0,), (0, 1), (1, 2), (2, 3)]
    assert parse_conditioning("instruction").context(context, 3) == ()


@pytest.mark.parametrize(
    "mode", ["", "window", "window:", "window:0", "window:-1", "window:1.5", "Isolated", "x"]
)
def test_unknown_modes(mode: str) -> None:
    with pytest.raises(UnknownConditioningError, match=r"Known ones: isolated, instruction, window:k"):
        parse_conditioning(mode)


@pytest.mark.parametrize(
    ("mode", "prefix"),
    [("isolated", 2), ("instruction", 12), ("window:1", 23), ("window:3", 48), ("window:9", 62)],
)
def test_the_exact_prefix_is_what_saw_all_that_precedes_it(mode: str, prefix: int) -> None:
    planned = plan(mode)
    assert planned.prefix == prefix
    assert planned.query_start == 62
    assert planned.reusable_tokens == 62 - prefix == sum(len(s.token_ids) for s in planned.reusable)


def test_a_plan_of_a_query_alone() -> None:
    planned = plan("window:3", instruction=False, documents=0)
    assert (planned.prefix, planned.query_start, planned.reusable_tokens, planned.stored) == (0, 0, 0, ())


def test_lineages_follow_the_path() -> None:
    one, other = plan("window:2").stored, plan("window:3").stored
    assert [len(part.lineages) for part in one] == [1, 2, 3, 4, 4, 4]
    assert [a.lineage.key == b.lineage.key for a, b in zip(one, other, strict=True)] == [True] * 4 + [
        False
    ] * 2
    assert one[3].lineages[0].key == one[0].lineage.key, "the path begins with the instruction"
    assert plan("isolated").stored[2].lineage.key != plan("instruction").stored[2].lineage.key
