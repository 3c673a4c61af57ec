"""`ReplayCache`: a model's answers on disk, recorded once and replayed in tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import xxhash
from langchain_core.caches import RETURN_VAL_TYPE, BaseCache
from langchain_core.messages import message_to_dict, messages_from_dict
from langchain_core.outputs import ChatGeneration, Generation

from langchain_rolling_kv.errors import ReplayMissError

# What a message says of how it was made; a replayed conversation has other values of it.
_HISTORY = ("id", "response_metadata", "usage_metadata")


class ReplayCache(BaseCache):
    """An LLM cache of one JSON file a call, which can be read, reviewed and kept with the tests.

    Pass it as `cache=` to a chat model. Since answers of ChatRollingKV are functions of the prompt, a
    replayed run is the recorded one; a call that differs in anything is a miss.

    Args:
        folder: made when missing.
        mode: `record` keeps new answers; `replay` raises when an answer is missing, and never calls a model.
    """

    def __init__(self, folder: str | Path, *, mode: Literal["record", "replay"] = "record") -> None:
        self.folder = Path(folder)
        self.mode = mode

    def lookup(self, prompt: str, llm_string: str) -> RETURN_VAL_TYPE | None:
        """The recorded answer.

        Raises:
            ReplayMissError: there is none, and the mode is `replay`.
        """
        path = self._path(prompt, llm_string)
        if path.exists():
            recorded = json.loads(path.read_text(encoding="utf-8"))
            return [_restored(one) for one in recorded["generations"]]
        if self.mode == "replay":
            raise ReplayMissError(
                f"No answer is recorded in {self.folder} for the call {path.stem}, whose prompt ends with "
                f"{prompt[-200:]!r}. Prompt, tools or settings differ from those of the recording; record it "
                "again with mode='record'."
            )
        return None

    def update(self, prompt: str, llm_string: str, return_val: RETURN_VAL_TYPE) -> None:
        path = self._path(prompt, llm_string)
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(
            {"prompt": prompt, "llm": llm_string, "generations": [_kept(one) for one in return_val]},
            ensure_ascii=False,
            indent=1,
        )
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(f"{text}\n", encoding="utf-8")
        unfinished.replace(path)

    def clear(self, **kwargs: Any) -> None:
        for path in self.folder.glob("*.json"):
            path.unlink()

    def _path(self, prompt: str, llm_string: str) -> Path:
        said = _said(prompt)
        key = f"{len(said)}\0{said}{llm_string}".encode("utf-8", errors="surrogatepass")
        return self.folder / f"{xxhash.xxh3_128_hexdigest(key)}.json"


def _said(prompt: str) -> str:
    """A prompt, which is messages as JSON, without their history; any other prompt as it is."""
    try:
        messages = json.loads(prompt)
        for message in messages:
            for name in _HISTORY:
                message["kwargs"].pop(name, None)
    except (ValueError, KeyError, TypeError, AttributeError):
        return prompt
    return json.dumps(messages, ensure_ascii=False, sort_keys=True)


def _kept(generation: Generation) -> dict[str, Any]:
    kept = {"text": generation.text, "generation_info": generation.generation_info}
    return kept | (
        {"message": message_to_dict(generation.message)} if isinstance(generation, ChatGeneration) else {}
    )


def _restored(kept: dict[str, Any]) -> Generation:
    if "message" not in kept:
        return Generation(text=kept["text"], generation_info=kept["generation_info"])
    (message,) = messages_from_dict([kept["message"]])
    return ChatGeneration(message=message, generation_info=kept["generation_info"])
