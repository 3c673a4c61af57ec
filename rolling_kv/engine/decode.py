"""Decoding: from the first token's logits to the end of the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from rolling_kv.answer import FinishReason
from rolling_kv.engine.tokenizer import ModelTokenizer
from rolling_kv.errors import ConfigError
from rolling_kv.options import AskOptions, Guide, PrefillOptions


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen: the likeliest at temperature 0, else drawn with `seed`.

    Args:
        temperature: divides the logits.
        top_k: only the k likeliest tokens are drawn from (None: all).
        top_p: only the likeliest tokens that together reach this probability are drawn from.
        seed: the same seed draws the same answer from the same logits.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.temperature, int | float) or not self.temperature >= 0.0:
            raise ConfigError(f"temperature is {self.temperature}; expected 0 (greedy) or more.")
        if not isinstance(self.top_p, int | float) or not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p is {self.top_p}; expected more than 0 and at most 1.")
        if self.top_k is not None and (not isinstance(self.top_k, int) or self.top_k < 1):
            raise ConfigError(f"top_k is {self.top_k}; expected at least 1, or None.")
        if not isinstance(self.seed, int):
            raise ConfigError(f"seed is {self.seed}; expected a whole number.")

    def chooser(self) -> Callable[[torch.Tensor], int]:
        """A function from logits [vocabulary] to a token id, with random state of its own."""
        if self.temperature == 0.0:
            return lambda logits: int(logits.argmax())
        generator = torch.Generator().manual_seed(self.seed)

        def draw(logits: torch.Tensor) -> int:
            ordered, ids = torch.sort(logits.cpu().double() / self.temperature, descending=True, stable=True)
            probabilities = ordered[: self.top_k].softmax(-1)
            before = probabilities.cumsum(-1) - probabilities
            probabilities = probabilities.masked_fill(before >= self.top_p, 0.0)
            return int(ids[torch.multinomial(probabilities, 1, generator=generator)])

        return draw


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """When an answer ends, and how its tokens are chosen.

    Args:
        max_new_tokens: tokens at most.
        stop: strings that end it and are not part of it.
        guide: keeps it to a form.
    """

    max_new_tokens: int = 64
    stop: tuple[str, ...] = ()
    sampling: Sampling = Sampling()
    guide: Guide | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens!r}; expected at least 1.")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ConfigError(
                f"stop is {self.stop!r}; expected strings that are not empty: an empty one would end every "
                "answer at once."
            )


def decoding_settings(options: AskOptions) -> tuple[DecodeSettings, PrefillOptions]:
    """Parts the options of `ask` into those of decoding, validated, and those of prefilling.

    Raises:
        ConfigError: an option of decoding is not as expected.
    """
    left: dict[str, Any] = dict(options)
    sampling = {name: left.pop(name) for name in ("temperature", "top_k", "top_p", "seed") if name in left}
    decoding = {name: left.pop(name) for name in ("max_new_tokens", "stop", "guide") if name in left}
    if "stop" in decoding:
        stop = decoding["stop"]
        decoding["stop"] = (
            tuple(stop) if isinstance(stop, Sequence) and not isinstance(stop, str) else (stop,)
        )
    return DecodeSettings(**decoding, sampling=Sampling(**sampling)), cast("PrefillOptions", left)


class Decoding:
    """Yields an answer's text piece by piece; what it knows at the end is in its fields.

    Text that may turn out to be the beginning of a stop string is held back until it is clear.

    Args:
        logits: after the prompt, [vocabulary].
        step: logits after one more token.
        chosen: called with every token that is chosen, the answer's end too, and the logits that it was
            chosen from, before any guide.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        *,
        step: Callable[[int], torch.Tensor],
        tokenizer: ModelTokenizer,
        eos_ids: frozenset[int],
        settings: DecodeSettings,
        clock: Callable[[], float] = time.perf_counter,
        chosen: Callable[[int, torch.Tensor], None] | None = None,
    ) -> None:
        self._logits = logits
        self._step = step
        self._tokenizer = tokenizer
        self._choose = settings.sampling.chooser()
        self._eos_ids = eos_ids
        self._stop = settings.stop
        self._max_new_tokens = settings.max_new_tokens
        self._guide = settings.guide
        self._clock = clock
        self._chosen = chosen
        self._likeliest: list[torch.Tensor] = []  # the two largest logits of each step
        self.first_token_seconds = 0.0
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason = "length"

    def __iter__(self) -> Iterator[str]:
        text = ""
        for _, piece in self._tokenizer.pieces(self._tokens()):
            text += piece
            end = min((at for at in (text.find(stop) for stop in self._stop) if at >= 0), default=None)
            if end is not None:
                self.finish_reason = "stop"
                yield from self._show(text[:end])
                return
            yield from self._show(text[: len(text) - self._undecided(text)])
        rest = self._tokenizer.decode(self.token_ids)
        yield from self._show(rest if rest.startswith(text) else text)

    @property
    def margins(self) -> list[float]:
        """Between the two likeliest tokens where each was chosen, and the end of the answer, in logits."""
        return [float(first - second) for first, second in self._likeliest]

    def _tokens(self) -> Iterator[int]:
        logits = self._logits
        while True:
            started = self._clock()
            token_id = self._choose(logits if self._guide is None else self._guide(self.token_ids, logits))
            if not self.token_ids:
                self.first_token_seconds = self._clock() - started
            self._likeliest.append(logits.topk(2).values)
            if self._chosen is not None:
                self._chosen(token_id, logits)
            if token_id in self._eos_ids:
                self.finish_reason = "eos"
                return
            self.token_ids.append(token_id)
            yield token_id
            if len(self.token_ids) >= self._max_new_tokens:
                return
            logits = self._step(token_id)

    def _show(self, text: str) -> Iterator[str]:
        piece, self.text = text[len(self.text) :], text
        if piece:
            yield piece

    def _undecided(self, text: str) -> int:
        """How many characters at the end of `text` may be the beginning of a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0
