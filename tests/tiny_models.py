"""Tiny random models and a byte-level tokenizer, made from nothing."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3_text")

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

HERMES = (  # ChatML with tools, calls and results in the manner of Hermes and Qwen
    "{% if tools %}{{ '<|im_start|>system\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content + "
    "'\n\n' }}{% endif %}{{ '# Tools\n' }}{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{% elif m.role != 'system' or not tools %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    '{% for call in m.tool_calls %}{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", '
    "\"arguments\": ' + call.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_EXTRA: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 48},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 24,
        "query_pre_attn_scalar": 16,
        "sliding_window_pattern": 3,
    },
}


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens, with ChatML's special tokens and template: 256 + 3 ids."""
    vocabulary = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", "<|end|>"],
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def tiny_model(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """Six layers, float32, weights large enough that attention matters; no token is ever an end of text."""
    settings: dict[str, Any] = {
        "vocab_size": 260,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.1,  # the default, 0.02, keeps attention almost flat
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = CONFIG_MAPPING[family](**(settings | _EXTRA.get(family, {}) | overrides))
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()
