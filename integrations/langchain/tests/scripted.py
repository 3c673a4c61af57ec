"""An engine that says what a script has it say, over a real model.

Random weights cannot write `{"input": 3}`. Layout, stored KV and prefill are those of a tiny model; only the
logits are replaced, so that greedy decoding spells the script's reply to the prompt.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from rolling_kv import load_engine
from rolling_kv.engine.host import TransformersHost
from rolling_kv.engine.stitch import StitchedKV
from tests.tiny_models import CHATML, tiny_model, tiny_tokenizer

Script = Callable[[str], str]

_VOCABULARY = 260


loaded_once = cache(load_engine)
"""Loads a model by name for all tests together."""


@cache
def tiny_engine(*, template: str = CHATML, seed: int = 0) -> TransformersHost:
    """A tiny real model with room for prompts that list tools, byte by byte."""
    return TransformersHost(_model(seed), _tokenizer(template), name=f"tiny-{seed}")


class ScriptedEngine(TransformersHost):
    """A tiny model whose answers are `script(prompt)`; `prompts` are those that it has seen."""

    def __init__(self, script: Script, *, template: str = CHATML) -> None:
        super().__init__(_model(0), _tokenizer(template), name="scripted")
        self.prompts: list[str] = []
        self._script = script
        self._replies: dict[int, tuple[int, list[int]]] = {}  # by the id of the KV that is decoded over

    def fuse(self, stitched: StitchedKV, token_ids: Sequence[int], *, rows: torch.Tensor) -> torch.Tensor:
        super().fuse(stitched, token_ids, rows=rows)
        prompt = self.tokenizer.decode(token_ids)
        self.prompts.append(prompt)
        (end,) = self.eos_ids
        reply = [*self.tokenizer.encode(self._script(prompt), special=False), end]
        self._replies[id(stitched)] = len(token_ids), reply
        return torch.nn.functional.one_hot(torch.tensor(reply[0]), _VOCABULARY).float()

    def follow(self, stitched: StitchedKV, token_ids: Sequence[int], *, position: int) -> torch.Tensor:
        start, reply = self._replies[id(stitched)]
        upcoming = reply[position - start + 1 :][: len(token_ids)]
        return torch.nn.functional.one_hot(torch.tensor(upcoming), _VOCABULARY).float()


@cache
def scripted_engine(template: str) -> ScriptedEngine:
    """One that goes by the prompt, to share."""
    return ScriptedEngine(by_the_prompt, template=template)


def by_the_prompt(prompt: str) -> str:
    """Calls the first function that the prompt lists, keeps to its schema, or says a sentence."""
    asked = prompt.rpartition("user\n")[2]
    listed = [json.loads(line) for line in prompt.splitlines() if re.match(r'\{.*"(parameters|type)"', line)]
    if not listed or asked.startswith("<tool_response>"):
        return "It is sunny, and the sum is 3."
    first = listed[0].get("function", listed[0])
    if "parameters" not in first:
        return json.dumps(_filled(first, asked), ensure_ascii=False)
    call = {"name": first["name"], "arguments": _filled(first["parameters"], asked)}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def _filled(schema: dict[str, Any], asked: str) -> Any:
    kind = schema.get("type") or schema["anyOf"][0]["type"]
    quoted = re.findall(r"'([^']+)'", asked)
    if kind == "object":
        properties = schema.get("properties") or {name: {"type": "string"} for name in quoted}
        return {name: _filled(one, asked) for name, one in properties.items()}
    if kind == "integer":
        return int((re.findall(r"\d+", asked) or ["1"])[0])
    return quoted[0] if quoted else "Pirate"


def _model(seed: int) -> Any:
    return tiny_model("llama", seed=seed, max_position_embeddings=16384)


def _tokenizer(template: str) -> Any:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = template
    return tokenizer
