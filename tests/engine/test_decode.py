"""Decoding: greedy against transformers' generate, sampling, stop strings, streaming."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from rolling_kv.engine.decode import DecodeSettings, Decoding, Sampling, decoding_settings
from rolling_kv.engine.host import TransformersHost
from rolling_kv.errors import ConfigError
from rolling_kv.options import Guide
from tests.engine.stock import stock_attention


def scripted(
    engine: TransformersHost,
    text: str,
    *,
    stop: Sequence[str] = (),
    limit: int = 1000,
    guide: Guide | None = None,
) -> Decoding:
    """A decoding whose model says exactly `text`, then an end of text."""
    ids = [*engine.tokenizer.encode(text, special=False), 259]

    def certain(token_id: int) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(token_id), 260).float()

    upcoming = iter(ids[1:])
    return Decoding(
        certain(ids[0]),
        step=lambda _: certain(next(upcoming)),
        tokenizer=engine.tokenizer,
        eos_ids=frozenset({259}),
        settings=DecodeSettings(stop=tuple(stop), max_new_tokens=limit, guide=guide),
    )


def test_greedy_decoding_is_transformers_generate(tiny_engine: TransformersHost) -> None:
    ids = tuple(range(40, 90))
    stitched = tiny_engine.stitch([], capacity=len(ids) + 24)
    logits = tiny_engine.fuse(stitched, ids, rows=torch.arange(len(ids)))
    position = iter(range(len(ids), len(ids) + 24))
    decoding = Decoding(
        logits,
        step=lambda token: tiny_engine.follow(stitched, [token], position=next(position))[-1],
        tokenizer=tiny_engine.tokenizer,
        eos_ids=frozenset(),
        settings=DecodeSettings(max_new_tokens=24),
    )
    list(decoding)
    with stock_attention(tiny_engine) as model:
        generated = model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=24, do_sample=False
        )
    assert decoding.token_ids == generated[0, len(ids) :].tolist()
    assert decoding.finish_reason == "length"


def test_a_guide_sees_the_answer_so_far_and_decides_what_may_come(llama_engine: TransformersHost) -> None:
    """The model would say "aab"; the guide forbids what was said before."""
    seen: list[tuple[int, ...]] = []

    def guide(token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(token_ids))
        allowed = logits.clone()
        allowed[list(token_ids)] = -torch.inf
        return allowed

    decoding = scripted(llama_engine, "aab", limit=3, guide=guide)
    list(decoding)
    a, b = llama_engine.tokenizer.encode("ab", special=False)
    assert decoding.token_ids[0] == a
    assert decoding.token_ids[1] != a
    assert decoding.token_ids[2] == b
    assert seen == [tuple(decoding.token_ids[:n]) for n in range(3)]


@pytest.mark.parametrize("text", ["plain", "ünïcödé 你好 🎈 mixed", "a\nb\n\nc", "🎈"])
def test_pieces_join_to_the_text(llama_engine: TransformersHost, text: str) -> None:
    decoding = scripted(llama_engine, text)
    pieces = list(decoding)
    assert "".join(pieces) == decoding.text == text
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert decoding.finish_reason == "eos"


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one END two", ["END"], "one "),
        ("one EN two", ["END"], "one EN two"),
        ("aab", ["ab"], "a"),
        ("ENDED", ["END"], ""),
        ("x\n\ny", ["\n\n", "y"], "x"),
        ("no stop at all EN", ["END"], "no stop at all EN"),
        ("early and late", ["late", "early"], ""),
    ],
)
def test_stop_strings_end_the_answer_and_are_never_shown(
    llama_engine: TransformersHost, text: str, stop: list[str], expected: str
) -> None:
    decoding = scripted(llama_engine, text, stop=stop)
    shown = ""
    for piece in decoding:
        shown += piece
        assert expected.startswith(shown), "a piece that was shown cannot be taken back"
    assert shown == decoding.text == expected
    assert decoding.finish_reason == ("stop" if expected != text else "eos")


def test_an_answer_cut_in_mid_character_shows_what_there_is(llama_engine: TransformersHost) -> None:
    decoding = scripted(llama_engine, "ab🎈", limit=4)
    assert "".join(decoding) == decoding.text
    assert decoding.text.startswith("ab")
    assert len(decoding.token_ids) == 4
    assert decoding.finish_reason == "length"


def test_sampling_follows_its_seed_and_its_bounds() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0])

    def drawn(count: int = 400, **settings: float) -> list[int]:
        choose = Sampling(**settings).chooser()  # type: ignore[arg-type]
        return [choose(logits) for _ in range(count)]

    assert drawn(temperature=1.0, seed=7) == drawn(temperature=1.0, seed=7)
    assert drawn(temperature=1.0, seed=7) != drawn(temperature=1.0, seed=8)
    assert set(drawn(temperature=1.0, top_k=2)) == {2, 3}
    assert set(drawn(temperature=1.0, top_p=0.6)) == {3}
    assert set(drawn(temperature=1.0, top_p=0.7)) == {2, 3}
    assert drawn(count=1) == [3]
    shares = torch.bincount(torch.tensor(drawn(count=20_000, temperature=1.0)), minlength=4) / 20_000
    torch.testing.assert_close(shares, logits.softmax(-1), atol=0.02, rtol=0)


@pytest.mark.parametrize(
    "settings",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": 0}],
)
def test_sampling_settings_outside_their_bounds(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        Sampling(**settings)  # type: ignore[arg-type]


def test_decoding_settings_outside_their_bounds(llama_engine: TransformersHost) -> None:
    with pytest.raises(ConfigError, match="max_new_tokens is 0"):
        scripted(llama_engine, "x", limit=0)
    with pytest.raises(ConfigError, match="empty one would end"):
        scripted(llama_engine, "x", stop=[""])


@pytest.mark.parametrize(
    ("stop", "expected"),
    [("END", ("END",)), (["a", "b"], ("a", "b")), ((), ())],
    ids=["one", "several", "none"],
)
def test_options_are_parted_and_checked_before_anything_is_computed(
    stop: str | Sequence[str], expected: tuple[str, ...]
) -> None:
    decoding, prefilling = decoding_settings({"stop": stop, "ratio": 0.3, "top_k": 2})
    assert decoding == DecodeSettings(stop=expected, sampling=Sampling(top_k=2))
    assert prefilling == {"ratio": 0.3}


@pytest.mark.parametrize("stop", ["", ["END", ""], [None], [b"END"], None], ids=repr)
def test_a_stop_string_that_is_none_is_refused(stop: Sequence[str]) -> None:
    with pytest.raises(ConfigError, match=r"^stop is"):
        decoding_settings({"stop": stop})
