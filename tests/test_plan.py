"""The plan of a call: prefix, reusable tokens and query partition the prompt, whatever its shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolling_kv.errors import PromptTooLongError
from rolling_kv.kv import ModelIdentity
from rolling_kv.plan import make_plan, require_positions
from rolling_kv.store import Lineage, make_lineage
from rolling_kv.window import Prompt, Segment, parse_conditioning
from rolling_kv.window.layout import SegmentKind

IDENTITY = ModelIdentity(name="m", model="1", tokenizer="2", rope="3", dtype="float32", device="cpu")
MODES = ("isolated", "instruction", "window:1", "window:2", "window:5")


def prompt(lengths: Sequence[tuple[str, int]]) -> Prompt:
    segments: list[Segment] = []
    start = 0
    for number, (kind, length) in enumerate(lengths):
        ids = tuple(100 * number + i for i in range(length))
        segments.append(Segment(kind=cast("SegmentKind", kind), name=str(number), token_ids=ids, start=start))
        start += length
    return Prompt(segments=tuple(segments))


def lineage_of(path: Sequence[Sequence[int]], *, gap: int = 0) -> Lineage:
    return make_lineage(IDENTITY, namespace="n", path=path, gap=gap)


lengths = st.integers(1, 4)
prompts = st.builds(
    lambda instruction, documents, query: prompt(
        [("instruction", n) for n in instruction]
        + [("document", n) for n in documents]
        + [("query", n) for n in query]
    ),
    st.lists(lengths, max_size=1),
    st.lists(lengths, max_size=7),
    st.lists(lengths, min_size=1, max_size=1),
)


@given(prompts, st.sampled_from(MODES))
def test_prefix_reusable_and_query_partition_the_prompt(given_prompt: Prompt, mode: str) -> None:
    planned = make_plan(given_prompt, conditioning=parse_conditioning(mode), lineage_of=lineage_of)
    positions = [*range(planned.prefix)]
    for segment in planned.reusable:
        positions += range(segment.start, segment.stop)
    assert len(positions) == planned.prefix + planned.reusable_tokens == planned.query_start
    positions += range(planned.query_start, len(given_prompt))
    assert positions == list(range(len(given_prompt)))
    assert given_prompt.token_ids[planned.query_start :] == given_prompt.segments[-1].token_ids


@given(prompts, st.sampled_from(MODES))
def test_the_prefix_is_exactly_what_full_prefill_would_compute(given_prompt: Prompt, mode: str) -> None:
    """Its segments were computed after all that precedes them, at their own positions; the next was not."""
    planned = make_plan(given_prompt, conditioning=parse_conditioning(mode), lineage_of=lineage_of)
    for part in planned.stored:
        seen = tuple(token for step in part.lineage.path for token in step.token_ids)
        saw_everything = seen == given_prompt.token_ids[: part.segment.stop]
        assert saw_everything == (part.segment.start < planned.prefix)
        if saw_everything:
            assert part.lineage.segment.start == part.segment.start


@given(prompts, st.sampled_from(MODES))
def test_lineages_grow_by_one_segment(given_prompt: Prompt, mode: str) -> None:
    planned = make_plan(given_prompt, conditioning=parse_conditioning(mode), lineage_of=lineage_of)
    assert [part.segment for part in planned.stored] == list(given_prompt.context)
    for part in planned.stored:
        assert part.lineage.segment.token_ids == part.segment.token_ids
        assert [one.path for one in part.lineages] == [
            part.lineage.path[: length + 1] for length in range(len(part.lineages))
        ]


def test_moving_the_window_changes_only_what_saw_the_change() -> None:
    """window:2, the oldest document evicted: the two after it saw it, the ones behind them did not."""
    held = [("instruction", 3), *[("document", 4)] * 5, ("query", 2)]
    full = prompt(held)
    kept = [full.segments[0], *full.segments[2:]]
    moved = prompt([(s.kind, len(s.token_ids)) for s in kept])
    moved = Prompt(
        tuple(
            Segment(kind=new.kind, name=old.name, token_ids=old.token_ids, start=new.start)
            for new, old in zip(moved.segments, kept, strict=True)
        )
    )
    mode = parse_conditioning("window:2")
    keys = [
        {
            part.segment.name: part.lineage.key
            for part in make_plan(p, conditioning=mode, lineage_of=lineage_of).stored
        }
        for p in (full, moved)
    ]
    assert {name: keys[0][name] == keys[1][name] for name in keys[1]} == {
        "0": True,
        "2": False,
        "3": False,
        "4": True,
        "5": True,
    }


@pytest.mark.parametrize(("positions", "room"), [(20, 0), (20, 5), (21, 6)])
def test_a_prompt_that_just_fits(positions: int, room: int) -> None:
    require_positions(
        prompt([("instruction", 5), ("document", 8), ("query", 2)]), room=room, positions=positions, model="m"
    )


@pytest.mark.parametrize(
    ("positions", "fitting", "window"),
    [(33, 2, 2), (25, 2, 2), (24, 1, 1), (16, 1, 1), (15, 0, 1), (3, 0, 1)],
)
def test_an_error_says_how_many_of_the_newest_documents_would_fit(
    positions: int, fitting: int, window: int
) -> None:
    held = prompt([("instruction", 4), *[("document", 9)] * 3, ("query", 2)])
    with pytest.raises(PromptTooLongError) as caught:
        require_positions(held, room=1, positions=positions, model="tiny")
    message = str(caught.value)
    for part in ("has 33 tokens", "1 more", f"'tiny' has {positions} positions", "the 3 documents"):
        assert part in message
    assert f"the newest {fitting} would fit" in message
    assert f"window={window} " in message
