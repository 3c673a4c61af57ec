"""Session settings: what is accepted, and what an error says of the rest."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rolling_kv.config import (
    DEFAULT_CONDITIONING,
    DEFAULT_FRESH_TAIL,
    DEFAULT_POLICY,
    DEFAULT_RATIO,
    SessionConfig,
    SessionSettings,
    require_ratio,
    session_config,
)
from rolling_kv.errors import ConfigError, InvalidRatioError, UnknownConditioningError, UnknownPolicyError
from rolling_kv.options import prefill_settings


def test_defaults_are_valid() -> None:
    config = session_config()
    assert (config.policy, config.ratio, config.conditioning, config.fresh_tail) == (
        DEFAULT_POLICY,
        None,
        DEFAULT_CONDITIONING,
        DEFAULT_FRESH_TAIL,
    )
    assert (config.window, config.window_tokens, config.store, config.namespace) == (
        None,
        None,
        None,
        "default",
    )
    assert config.deterministic


def test_settings_are_kept_as_given() -> None:
    given = {
        "window": 84,
        "window_tokens": 6000,
        "policy": "token-topk",
        "ratio": 1,
        "conditioning": "window:8",
    }
    given |= {"store": Path("somewhere"), "namespace": "mine", "ingest": "lazy", "selection_layer": 2}
    config = session_config(**given)
    assert {name: getattr(config, name) for name in given} == given
    assert isinstance(config.ratio, float)


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        session_config().ratio = 0.5


@pytest.mark.parametrize("ratio", [0, 1, 0.0, 1.0, 0.05, 5e-324])
def test_ratios_from_0_to_1(ratio: float) -> None:
    assert require_ratio(ratio) == ratio
    assert session_config(policy="epic", ratio=ratio).ratio == ratio


@pytest.mark.parametrize(
    "ratio", [-0.1, 1.0000001, 5, math.nan, math.inf, -math.inf, True, "0.1", [0.1], 1j], ids=repr
)
@pytest.mark.parametrize("setting", ["ratio", "anchor_ratio"])
def test_other_ratios_are_refused(setting: str, ratio: object) -> None:
    with pytest.raises(
        InvalidRatioError, match=r"expected a number from 0 .* to 1 .*for example 0\.1"
    ) as caught:
        session_config(**{setting: ratio})
    assert repr(ratio) in str(caught.value)


def test_only_the_ratio_may_be_left_open() -> None:
    assert session_config(ratio=None).ratio is None
    with pytest.raises(InvalidRatioError, match="None"):
        session_config(anchor_ratio=None)


def test_a_ratio_that_nothing_makes_use_of_is_refused() -> None:
    for policy in ({}, {"policy": "direct-reuse"}):
        with pytest.raises(ConfigError, match=r"ratio is 0\.2, .*policy='document-aligned', or leave"):
            session_config(ratio=0.2, **policy)
    assert session_config(ratio=0.0).ratio == 0.0
    config = session_config()
    with pytest.raises(ConfigError, match=r"ratio is 0\.2"):
        prefill_settings(config, {"ratio": 0.2}, layers=4)
    assert prefill_settings(config, {"policy": "epic"}, layers=4).ratio == DEFAULT_RATIO
    assert prefill_settings(config, {"policy": "epic", "ratio": 0.2}, layers=4).ratio == 0.2
    own = session_config(policy="epic", ratio=0.3)
    assert prefill_settings(own, {"policy": "token-topk"}, layers=4).ratio == 0.3
    assert prefill_settings(own, {"policy": "full-prefill"}, layers=4).ratio == 0.3, (
        "of no use, and not asked for"
    )


@pytest.mark.parametrize(
    ("tail", "settings"),
    [
        (1, {}),
        (1, {"conditioning": "window:3", "fresh_tail": None}),
        (1, {"conditioning": "stream:3", "deterministic": False}),
        (1, {"preroll": "slide"}),
        (0, {"preroll": "wait"}),
        (0, {"conditioning": "isolated"}),
        (0, {"conditioning": "full"}),
        (0, {"conditioning": "first-seen", "deterministic": False}),
        (2, {"conditioning": "isolated", "fresh_tail": 2}),
    ],
)
def test_the_newest_document_is_fresh_where_that_helps(tail: int, settings: dict[str, Any]) -> None:
    config = session_config(**settings)
    assert config.fresh_tail == tail
    assert session_config(**config.model_dump()) == config, "as a trace records it"


@pytest.mark.parametrize("policy", ["", "magic", "Token-TopK", "token_topk"])
def test_an_unknown_policy_lists_the_known_ones(policy: str) -> None:
    with pytest.raises(UnknownPolicyError, match=r"Known ones: .*document-aligned.*token-topk") as caught:
        session_config(policy=policy)
    assert repr(policy) in str(caught.value)


@pytest.mark.parametrize("mode", ["", "window", "window:0", "window:3 ", "window:٣", "magic"])
def test_an_unknown_conditioning_lists_the_known_ones(mode: str) -> None:
    with pytest.raises(
        UnknownConditioningError, match="Known ones: isolated, instruction, window:k"
    ) as caught:
        session_config(conditioning=mode)
    assert repr(mode) in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("window", 0, "at least 1"),
        ("window", -84, "at least 1"),
        ("window", "84", "valid integer"),
        ("window", 84.0, "valid integer"),
        ("window", True, "valid integer"),
        ("window_tokens", 0, "at least 1"),
        ("window_tokens", "6000", "valid integer"),
        ("selection_layer", 0, "at least 1"),
        ("selection_layer", None, "valid integer"),
        ("instruction", None, "valid string"),
        ("instruction", b"bytes", "valid string"),
        ("policy", None, "valid string"),
        ("conditioning", 3, "valid string"),
        ("namespace", "", "expected a name"),
        ("namespace", None, "valid string"),
        ("store", 7, "valid string"),
        ("ingest", "sometimes", "'eager' or 'lazy'"),
        ("anchor_rule", "magic", "'kvzip', 'knorm' or 'sink'"),
        ("deterministic", "yes", "valid boolean"),
        ("windows", 84, "not permitted"),
    ],
)
def test_an_error_names_the_setting_its_value_and_what_was_expected(
    setting: str, value: object, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        session_config(**{setting: value})
    message = str(caught.value)
    assert setting in message
    assert repr(value) in message
    assert expected in message


def test_all_that_is_wrong_is_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"window = 0: .*; namespace = '': "):
        session_config(window=0, namespace="")


def test_every_setting_is_documented_and_has_a_default() -> None:
    assert set(SessionSettings.__annotations__) == set(SessionConfig.model_fields)
    described = SessionSettings.__doc__ or ""
    assert [name for name in SessionConfig.model_fields if not re.search(rf"\b{name}\b.*:", described)] == []
