"""Layers loaded ahead: the same bits, wherever stored KV is, and errors that are not lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rolling_kv import RollingSession
from rolling_kv.engine.host import TransformersHost
from rolling_kv.engine.stitch import PlacedKV, StitchedKV
from rolling_kv.errors import ConfigError
from rolling_kv.policies import create_policy

NOTES = [f"Note {number} of the day says {number * 7919 % 1000}." for number in range(8)]


def placed(engine: TransformersHost) -> list[PlacedKV]:
    first, second = engine.extend([], list(range(30))), engine.extend([], list(range(40, 65)))
    return [PlacedKV(kv=first, position=0), PlacedKV(kv=second, position=30)]


@pytest.mark.parametrize(
    "policy", ["direct-reuse", "document-aligned", "token-topk-gradual", "prophetkv", "qcfuse"]
)
@pytest.mark.parametrize("on_disk", [False, True])
def test_bits_do_not_depend_on_it(
    llama_engine: TransformersHost, tmp_path: Path, policy: str, on_disk: bool
) -> None:
    found = set()
    store = tmp_path if on_disk else None
    for pipeline in ("off", "on", "on"):
        with RollingSession.open(
            model=llama_engine,
            window=6,
            policy=policy,
            ratio=0.3 if create_policy(policy).recomputes else None,
            store=store,
            pipeline=pipeline,
        ) as session:
            session.extend(NOTES[:6])
            first = session.ask("Which number?", max_new_tokens=3)
            session.append(NOTES[6])
            second = session.ask("Which number?", max_new_tokens=3)
            other = session.ask("Which number?", max_new_tokens=3, pipeline="off")
        assert second.token_ids == other.token_ids
        assert second.trace.logits_fingerprint == other.trace.logits_fingerprint
        found.add((first.trace.logits_fingerprint, second.trace.logits_fingerprint, second.token_ids))
    assert len(found) == 1


def test_every_family_fills_the_same_layers(tiny_engine: TransformersHost) -> None:
    plain = tiny_engine.stitch(placed(tiny_engine), capacity=60)
    ahead = tiny_engine.stitch(placed(tiny_engine), capacity=60, ahead=True)
    for index in (0, 1, 4, 2, 3, 5, 5):  # a probe may begin anywhere
        for ours, theirs in zip(ahead.layer(index), plain.layer(index), strict=True):
            assert torch.equal(ours, theirs)
        assert torch.equal(ahead.stored_keys(index), plain.stored_keys(index))


def test_a_layer_is_filled_once_and_before_it_is_asked_for(
    llama_engine: TransformersHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled: list[int] = []
    fill = StitchedKV._fill
    parts = placed(llama_engine)
    monkeypatch.setattr(StitchedKV, "_fill", lambda self, index: (filled.append(index), fill(self, index))[1])
    stitched = llama_engine.stitch(parts, capacity=60, ahead=True)
    stitched.layer(0)
    stitched._promised[1].future.result()
    assert filled == [0, 1]
    for index in range(llama_engine.layers):
        stitched.layer(index)
    assert filled == list(range(llama_engine.layers))


def test_what_fails_ahead_fails_where_it_is_needed(
    llama_engine: TransformersHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill, parts = StitchedKV._fill, placed(llama_engine)

    def failing(self: StitchedKV, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 2:
            raise OSError("the disk is gone")
        return fill(self, index)

    monkeypatch.setattr(StitchedKV, "_fill", failing)
    stitched = llama_engine.stitch(parts, capacity=60, ahead=True)
    stitched.layer(0)
    stitched.layer(1)
    with pytest.raises(OSError, match="the disk is gone"):
        stitched.layer(2)


def test_an_unknown_setting_is_refused(llama_engine: TransformersHost) -> None:
    with pytest.raises(ConfigError, match="pipeline"):
        RollingSession.open(model=llama_engine, pipeline="yes")  # type: ignore[arg-type]
    with (
        RollingSession.open(model=llama_engine, instruction="x") as session,
        pytest.raises(ConfigError, match="pipeline is 'yes'"),
    ):
        session.ask("Which?", pipeline="yes")  # type: ignore[arg-type]
