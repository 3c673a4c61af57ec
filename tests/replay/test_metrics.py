"""Figures of a replay against cases counted by hand."""

from __future__ import annotations

import pytest

from rolling_kv.bench.statistics import share_of
from rolling_kv.errors import BenchError
from rolling_kv.replay.metrics import comparisons_of, figures_of
from rolling_kv.replay.parting import Parting, first_difference, parting_of, sentence
from rolling_kv.replay.rows import ReplayRow
from rolling_kv.replay.runs import runs_of
from tests.replay.synthetic import grid, reference, row

SAME, OTHER, THIRD = (10, 11, 12), (10, 99, 12), (7,)


def rows_of(arm: str, answers: dict[str, list[tuple[int, ...]]]) -> list[ReplayRow]:
    """Order to the answer of each request."""
    return [
        row(arm, order, request, token_ids=token_ids, text=str(token_ids))
        for order, found in answers.items()
        for request, token_ids in enumerate(found)
    ]


def test_variation_and_fidelity_by_hand() -> None:
    rows = rows_of("a", {"chronological": [SAME, SAME], "reversed": [SAME, OTHER], "random:0": [SAME, THIRD]})
    arm = figures_of(runs_of([reference(0), reference(1)], rows), "a")
    assert arm.variation is not None
    assert arm.varying is not None
    assert (arm.variation.hits, arm.variation.count) == (3, 6)  # all three pairs of request 1, none of 0
    assert (arm.varying.hits, arm.varying.count) == (1, 2)
    assert [one.fidelity.share for one in arm.orders] == [1.0, 0.5, 0.5]
    assert (arm.total.fidelity.hits, arm.total.fidelity.count, arm.total.requests) == (4, 6, 2)
    assert arm.orders[0].fidelity == share_of([True, True])
    assert len(arm.partings) == 3
    assert arm.missing == {}


def test_only_orders_that_hold_a_request_make_its_pairs() -> None:
    rows = rows_of("a", {"chronological": [SAME, SAME, SAME], "reversed": [OTHER, SAME], "random:0": [THIRD]})
    arm = figures_of(runs_of([reference(n) for n in range(3)], rows), "a")
    assert arm.variation is not None
    assert (arm.variation.hits, arm.variation.count) == (3, 4)
    assert arm.missing == {"reversed": 1, "random:0": 2}


def test_controls_are_no_orders() -> None:
    answers = {"chronological": [SAME, SAME], "repeat": [SAME, OTHER], "reset": [OTHER, THIRD]}
    runs = runs_of([reference(0), reference(1)], rows_of("a", answers))
    arm = figures_of(runs, "a")
    assert (arm.variation, arm.varying, arm.logits_differ, arm.kv_differ) == (None, None, None, None)
    assert [one.order for one in arm.orders] == ["chronological"]
    assert arm.total.fidelity.share == 1.0
    assert arm.reset is not None
    assert arm.reset.fidelity.share == 0.0
    assert arm.repeat is not None
    assert not arm.repeat.exact
    assert (arm.repeat.requests, arm.repeat.answers, arm.repeat.logits, arm.repeat.kv) == (2, 1, 0, 0)
    assert [(one.request, one.kind) for one in arm.repeat_partings] == [(1, "nondeterminism")]
    assert arm.to_dict()["repeat"]["exact"] is False
    assert runs.all_orders() == ("chronological",)


@pytest.mark.parametrize("field", ["logits_fingerprint", "kv_fingerprint"])
def test_a_repeat_of_other_bits_is_not_exact(field: str) -> None:
    rows = [row("a", "chronological", 0), row("a", "repeat", 0, **{field: grid(1, (0, 0))})]
    repeat = figures_of(runs_of([reference(0)], rows), "a").repeat
    assert repeat is not None
    assert not repeat.exact
    assert repeat.answers == 0


def test_bits_are_stricter_than_answers() -> None:
    rows = [
        row("a", "chronological", 0),
        row("a", "reversed", 0, logits_fingerprint="bb"),
        row("a", "chronological", 1),
        row("a", "reversed", 1, kv_fingerprint=grid(1, (2, 2))),
    ]
    arm = figures_of(runs_of([reference(0), reference(1)], rows), "a")
    assert arm.variation is not None
    assert arm.logits_differ is not None
    assert arm.kv_differ is not None
    assert (arm.variation.hits, arm.logits_differ.hits, arm.kv_differ.hits) == (0, 1, 1)


def test_means_medians_and_speed_by_hand() -> None:
    values = [(0.1, 0.5, 3, 0.2, 2.0), (0.3, 1.0, 9, None, 1.0), (0.2, 0.75, 4, 0.6, 0.5)]
    rows = [
        row(
            "a",
            "chronological",
            n,
            kl=kl,
            top1=top1,
            segments=segments,
            captured_deviation=captured,
            ttft=ttft,
        )
        for n, (kl, top1, segments, captured, ttft) in enumerate(values)
    ]
    references = [reference(0, ttft=4.0), reference(1, ttft=6.0), reference(2, ttft=1.5)]
    figures = figures_of(runs_of(references, rows), "a").orders[0]
    assert figures.kl == pytest.approx(0.2)
    assert figures.top1 == pytest.approx(0.75)
    assert figures.segments == 4
    assert figures.captured_deviation == pytest.approx(0.4)
    assert figures.ttft_median == 1.0
    assert figures.ttft_p95 == pytest.approx(1.9)  # between 1.0 and 2.0, at nine tenths
    assert figures.speedup == 3.0  # of 2, 6 and 3: by request, not 4.0 / 1.0 of the medians


def test_arms_are_compared_on_the_same_requests() -> None:
    first = rows_of("a", {"chronological": [SAME, SAME, OTHER], "reset": [SAME], "repeat": [SAME]})
    second = rows_of("b", {"chronological": [OTHER, SAME], "reset": [OTHER], "reversed": [SAME]})
    found = comparisons_of(runs_of([reference(n) for n in range(3)], first + second))
    assert [(one.order, one.requests, one.difference) for one in found] == [
        ("chronological", 2, 0.5),
        ("reset", 1, 1.0),
    ]
    assert (found[0].test.only_first, found[0].test.only_second, found[0].test.p) == (1, 0, 1.0)


def parted(one: ReplayRow, other: ReplayRow) -> Parting:
    found = parting_of(one, other, reference(0))
    assert found is not None
    return found


def test_answers_part_at_the_first_token_and_the_lowest_layer() -> None:
    one = row("a", "chronological", 0, kv_fingerprint=grid(1, (3, 0), (1, 4)))
    other = row(
        "a",
        "reversed",
        0,
        token_ids=(10, 11, 50),
        margins=(3.0, 3.0, 0.25, 1.0),
        kv_fingerprint=grid(2, (3, 0), (1, 4), (1, 3)),
    )
    found = parted(one, other)
    assert (found.token, found.tokens, found.margins) == (2, (12, 50), (1.0, 0.25))
    assert (found.layer, found.segment, found.segment_name) == (1, 3, "obs-3")
    assert found.kind == "history"
    assert "layer 1, in 'obs-3'" in sentence(found)
    assert "token 2, margins 1 and 0.25" in sentence(found)
    assert parting_of(one, one, reference(0)) is None


def test_an_answer_that_ends_sooner_parts_at_its_end() -> None:
    longer = row("a", "reversed", 0, token_ids=(10, 11, 12, 13), margins=(1.0, 1.0, 1.0, 0.125))
    found = parted(row("a", "chronological", 0), longer)
    assert (found.token, found.tokens, found.margins) == (3, (None, 13), (4.0, 0.125))
    assert parted(row("a", "chronological", 0, margins=()), longer).margins == (None, 0.125)


@pytest.mark.parametrize(
    ("margins", "kind"),
    [
        ((1e-5, 9e-4), "tie"),
        ((1e-5, 1e-3), "history"),  # the tolerance itself is none
        ((2.0, 1e-5), "history"),
        ((None, 1e-5), "history"),
    ],
)
def test_a_tie_is_close_in_both_orders(margins: tuple[float | None, float], kind: str) -> None:
    one, other = (
        row(
            "a",
            order,
            0,
            token_ids=token_ids,
            margins=() if margin is None else (margin,),
            kv_fingerprint=grid(value, (0, 1)),
        )
        for order, token_ids, margin, value in (
            ("chronological", (1,), margins[0], 1),
            ("reversed", (2,), margins[1], 2),
        )
    )
    assert parted(one, other).kind == kind


@pytest.mark.parametrize("kv", [grid(5, (0, 0)), ""])
def test_equal_bits_and_other_answers_are_a_run_that_varies(kv: str) -> None:
    one = row("a", "chronological", 0, kv_fingerprint=kv)
    found = parted(one, row("a", "reversed", 0, token_ids=(1,), kv_fingerprint=kv))
    assert (found.kind, found.layer, found.segment_name) == ("nondeterminism", None, None)
    assert "the run itself varies" in sentence(found)


def test_kv_of_one_order_only_has_no_place() -> None:
    one = row("a", "chronological", 0, kv_fingerprint="")
    found = parted(one, row("a", "reversed", 0, token_ids=(1,)))
    assert (found.kind, found.layer) == ("history", None)
    assert "only one of them used stored KV" in sentence(found)
    assert first_difference(one, one, reference(0)) is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no replayed requests"),
        ([row("a", "reversed", 3)], "Request 3 in order 'reversed' of arm 'a' has no full-prefill reference"),
        ([row("a", "reversed", 0, prompt_digest="x")], "another prompt"),
        ([row("a", "reversed", 0), row("a", "reversed", 0)], "measured twice"),
        ([row("a", "reset", 0)], "controls only"),
    ],
)
def test_rows_that_do_not_fit_together_are_refused(rows: list[ReplayRow], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        runs_of([reference(0)], rows)
    with pytest.raises(BenchError, match="two references"):
        runs_of([reference(0), reference(0)], [row("a", "reversed", 0)])
