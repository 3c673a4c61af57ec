"""The tokenizer of a transformers model, as the layout and decoding use it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any

import xxhash
from jinja2.exceptions import TemplateError as JinjaTemplateError
from tokenizers.decoders import DecodeStream

from rolling_kv.errors import TemplateError, UnsupportedModelError
from rolling_kv.window.layout import Message


class ModelTokenizer:
    """Wraps a fast tokenizer of transformers.

    Raises:
        UnsupportedModelError: the tokenizer has no backend of the tokenizers library.
    """

    def __init__(self, tokenizer: Any, *, name: str) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise UnsupportedModelError(
                f"The model {name!r} has no fast tokenizer (tokenizer.json). "
                "Convert it with transformers, or open another model."
            )
        self._tokenizer = tokenizer
        self._lock = Lock()  # whether special tokens are recognised is a state of the shared backend
        self.special_tokens: tuple[str, ...] = tuple(
            str(token) for token in tokenizer.added_tokens_decoder.values() if token.special
        )
        self.prefix_ids: tuple[int, ...] = tuple(tokenizer("")["input_ids"])
        self.eos_id: int | None = tokenizer.eos_token_id

    @property
    def fingerprint(self) -> str:
        """Of everything that decides ids: the backend's whole definition and the chat template."""
        return xxhash.xxh3_128_hexdigest(f"{self.definition}\0{self._tokenizer.chat_template or ''}".encode())

    @property
    def definition(self) -> str:
        """The backend as the tokenizers library serialises it (the content of tokenizer.json)."""
        return str(self._tokenizer.backend_tokenizer.to_str())

    @property
    def has_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        """Token ids of `text`, nothing added; special tokens are recognised only if `special`."""
        with self._lock:
            encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=not special)
        return tuple(encoded["input_ids"])

    def spells_special_token(self, text: str) -> bool:
        return any(token in text for token in self.special_tokens)

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Message] = (), generation: bool = True
    ) -> str | None:
        if not self.has_template:
            return None
        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=generation,
            )
        except (JinjaTemplateError, ValueError, TypeError, KeyError) as error:
            raise TemplateError(f"it refuses {[m['role'] for m in messages]}: {error}") from error
        return str(rendered)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` without special tokens."""
        return str(
            self._tokenizer.decode(
                list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def pieces(self, token_ids: Iterator[int]) -> Iterator[tuple[int, str]]:
        """Each id with the text that it completes, "" while a character is still in the making.

        The pieces joined are `decode` of the ids, but for a character that the last id leaves unfinished.
        """
        stream = DecodeStream(skip_special_tokens=True)
        for token_id in token_ids:
            yield token_id, stream.step(self._tokenizer.backend_tokenizer, token_id) or ""
