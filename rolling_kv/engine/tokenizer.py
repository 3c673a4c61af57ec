"""The tokenizer of a transformers model, as the layout and decoding use it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import date
from threading import Lock
from typing import Any

import xxhash
from jinja2.exceptions import TemplateError as JinjaTemplateError
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from rolling_kv.errors import TemplateError, UnsupportedModelError
from rolling_kv.window.layout import Message

TEMPLATE_DATE = date(2024, 7, 26)
"""Today, for chat templates that ask (`strftime_now`): a prompt does not depend on the day it is built on.
Llama 3's templates fall back to the same date. An agent that needs the date puts it into a document."""


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
        self._continuing = _without_prefix(tokenizer.backend_tokenizer)
        self.special_tokens: tuple[str, ...] = tuple(
            str(token) for token in tokenizer.added_tokens_decoder.values() if token.special
        )
        self.prefix_ids: tuple[int, ...] = tuple(tokenizer("")["input_ids"])
        self.eos_id: int | None = tokenizer.eos_token_id

    @property
    def fingerprint(self) -> str:
        """Of everything that decides ids: the backend's whole definition and the chat template."""
        template = self._tokenizer.chat_template or ""
        return xxhash.xxh3_128_hexdigest(f"{self.definition}\0{template}".encode())

    @property
    def definition(self) -> str:
        """The backend as the tokenizers library serialises it (the content of tokenizer.json)."""
        return str(self._tokenizer.backend_tokenizer.to_str())

    @property
    def has_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str, *, special: bool, first: bool = False) -> tuple[int, ...]:
        """Token ids of `text`, nothing added; special tokens are recognised only if `special`.

        Only a text that is `first` in the prompt gets the blank that the tokenizer may put before a text.
        """
        if self._continuing is None or first:
            return self._encode(text, special=special)
        # What stands behind a special token is the tokenizer's own affair: some put a blank there as well.
        places = (
            [place for token in self.special_tokens if (place := text.find(token)) >= 0] if special else []
        )
        end = min(places, default=len(text))
        ids = tuple(self._continuing.encode(text[:end], add_special_tokens=False).ids)
        return ids + self._encode(text[end:], special=special) if text[end:] else ids

    def _encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        with self._lock:
            encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=not special)
        return tuple(encoded["input_ids"])

    def offsets(self, text: str) -> tuple[tuple[int, int], ...]:
        """For each token of `encode(text, special=False)`, the characters that it stands for, [from, to)."""
        if self._continuing is not None:
            return tuple(self._continuing.encode(text, add_special_tokens=False).offsets)
        with self._lock:
            encoded = self._tokenizer(
                text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True
            )
        return tuple((low, high) for low, high in encoded["offset_mapping"])

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
                chat_template=_on_one_day(self._tokenizer.get_chat_template()),
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


def _on_one_day(template: str) -> str:
    """`template` with a `strftime_now` of its own, since transformers passes on text and numbers alone."""
    if "strftime_now" not in template:
        return template
    directives = ["-d", "-m", "-H", "-I", "-M", "-S", "-j", "-y", *"aAbBcdfHIjmMpSUwWxXyYZz"]
    told = "".join(f"|replace('%{one}', '{TEMPLATE_DATE.strftime(f'%{one}')}')" for one in directives)
    # The line break ends a line of its own, and is trimmed with it.
    return f"{{% macro strftime_now(format) %}}{{{{ format{told} }}}}{{% endmacro %}}\n{template}"


def _without_prefix(backend: Tokenizer) -> Tokenizer | None:
    """`backend` without the blank that it puts before a text, blind to special tokens; None if it puts none.

    The blank is `prepend_scheme` of Metaspace (Llama 2, Mistral), a Prepend normalizer in older files of the
    same models, and `add_prefix_space` of byte-level tokenizers.
    """
    definition = json.loads(backend.to_str())
    changed = json.loads(backend.to_str())
    for part in ("normalizer", "pre_tokenizer"):
        changed[part] = _continued(changed[part])
    if changed == definition:
        return None
    continuing = Tokenizer.from_str(json.dumps(changed))
    continuing.encode_special_tokens = True
    continuing.no_truncation()
    continuing.no_padding()
    return continuing


def _continued(part: Any) -> Any:
    """A normalizer or pre-tokenizer, as its definition has it, that puts nothing before a text."""
    if not isinstance(part, dict) or part["type"] == "Prepend":
        return None if isinstance(part, dict) else part
    if part["type"] == "Sequence":
        name = "normalizers" if "normalizers" in part else "pretokenizers"
        inner = [_continued(one) for one in part[name]]
        return part | {name: [one for one in inner if one is not None]}
    off: dict[str, dict[str, Any]] = {
        "Metaspace": {"prepend_scheme": "never"},
        "ByteLevel": {"add_prefix_space": False},
    }
    return part | off.get(part["type"], {})
