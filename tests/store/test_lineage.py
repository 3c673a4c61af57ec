"""Lineage: everything that KV was computed from, and nothing else, decides its key."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolling_kv.store import make_lineage
from rolling_kv.store.lineage import PathStep
from tests.store.samples import IDENTITY, lineage

ids = st.integers(min_value=0, max_value=5)
segments = st.lists(st.lists(ids, min_size=1, max_size=4).map(tuple), min_size=1, max_size=4).map(tuple)


def test_the_same_ingredients_give_the_same_key() -> None:
    assert lineage(7, 8) == lineage(7, 8)
    assert len(lineage(7, 8).key) == 32


@pytest.mark.parametrize("field", ["model", "tokenizer", "rope", "dtype", "device", "runtime"])
def test_each_part_of_the_model_is_in_the_key(field: str) -> None:
    other = replace(IDENTITY, **{field: "other"})
    assert lineage(7, identity=other).key != lineage(7).key


def test_the_name_of_a_model_is_for_people_and_not_in_the_key() -> None:
    assert lineage(7, identity=replace(IDENTITY, name="a copy")).key == lineage(7).key


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(lineage(7), lineage(7, namespace="other"), id="namespace"),
        pytest.param(lineage(7), lineage(8), id="own ids"),
        pytest.param(lineage(7, 8), lineage(8, 7), id="order of own ids"),
        pytest.param(lineage(7), lineage(7, before=[(1, 2, 4)]), id="ids before"),
        pytest.param(lineage(7), lineage(7, before=[]), id="nothing before"),
        pytest.param(lineage(7, before=[(1,), (2,)]), lineage(7, before=[(2,), (1,)]), id="order before"),
        pytest.param(lineage(7, before=[(1,), (2,)]), lineage(7, before=[(1, 2)]), id="segmentation before"),
        pytest.param(
            lineage(2, 7, before=[(1,)]), lineage(7, before=[(1, 2)]), id="where the segment begins"
        ),
        pytest.param(lineage(7, before=[(256,)]), lineage(7, before=[(1, 0)]), id="width of an id"),
    ],
)
def test_each_part_of_the_path_is_in_the_key(one: object, other: object) -> None:
    assert one.key != other.key  # type: ignore[attr-defined]


def test_text_cannot_move_from_one_field_to_the_next() -> None:
    """Fields are length-delimited: "ab" and "c" are not "a" and "bc"."""
    one = replace(IDENTITY, dtype="float32", device="cpu")
    other = replace(IDENTITY, dtype="float32c", device="pu")
    assert lineage(7, identity=one).key != lineage(7, identity=other).key
    assert (
        lineage(7, identity=replace(IDENTITY, device="cpux"), namespace="y").key
        != lineage(7, identity=replace(IDENTITY, device="cpu"), namespace="xy").key
    )


@given(one=segments, other=segments)
def test_keys_are_equal_only_when_paths_are(
    one: tuple[tuple[int, ...]], other: tuple[tuple[int, ...]]
) -> None:
    keys = {make_lineage(IDENTITY, namespace="n", path=path).key for path in (one, other)}
    assert len(keys) == len({one, other})


@given(segments)
def test_a_path_is_packed_from_position_0(path: tuple[tuple[int, ...]]) -> None:
    made = make_lineage(IDENTITY, namespace="n", path=path)
    assert [step.token_ids for step in made.path] == list(path)
    assert [step.start for step in made.path] == [sum(map(len, path[:i])) for i in range(len(path))]
    assert made.segment == made.path[-1]


def test_the_description_is_json_and_holds_digests_instead_of_ids() -> None:
    described = lineage(7, 8, namespace="mine").describe()
    assert json.loads(json.dumps(described)) == described
    assert described["namespace"] == "mine"
    assert described["model"] == IDENTITY.model
    assert described["path"] == [
        [0, 3, PathStep((1, 2, 3), start=0).digest],
        [3, 2, PathStep((7, 8), start=0).digest],
    ]
    assert PathStep((7, 8), start=0).digest != PathStep((8, 7), start=0).digest
