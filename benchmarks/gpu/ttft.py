"""Time to first token of a model with random weights: full prefill beside fusion of stored documents.

Random weights make no sense of a text, but they take the time that trained ones take.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.gpu.checks import relative
from benchmarks.gpu.scale import Scale
from rolling_kv.engine.host import TransformersHost
from rolling_kv.engine.stitch import PlacedKV
from rolling_kv.policies.base import Span, budget
from rolling_kv.policies.spans import fill_spans, rank_by_mean

_MOST = {torch.float32: 1e-4, torch.bfloat16: 5e-2}  # of logits, after all layers


def run(scale: Scale) -> dict[str, Any]:
    """Seconds, medians: full prefill by the stock forward, then stitching, selecting and fusing."""
    host = _host(scale)
    timed, checks = [], []
    for tokens in scale.lengths:
        prompt = _Prompt(host, scale, tokens)
        full = _seconds(scale, lambda p=prompt: host.stock_prefill(p.ids)[0])
        timed.append({"tokens": tokens, "policy": "full-prefill", "ttft": full})
        for ratio in scale.ratios:
            stages = [prompt.fused(ratio).seconds for _ in range(scale.repeats + 1)][1:]
            entry = {name: median(stage[name] for stage in stages) for name in stages[0]}
            entry["ttft"] = median(sum(stage.values()) for stage in stages)
            timed.append({"tokens": tokens, "policy": "document-aligned", "ratio": ratio, **entry})
            timed[-1]["sooner"] = full / entry["ttft"]
        checks += _check(scale, prompt)
    return {"timed": timed, "checks": checks}


def _check(scale: Scale, prompt: _Prompt) -> list[dict[str, Any]]:
    """The same fusion twice gives the same bits; by the torch kernels, the same logits but for rounding."""
    ratio = scale.ratios[-1]
    first, again = prompt.fused(ratio), prompt.fused(ratio)
    with _kernels("torch"):
        reference = prompt.fused(ratio, rows=first.rows).logits
    same = float(torch.equal(first.logits, again.logits))
    found = {
        f"fused logits of {len(prompt.ids)} tokens": (relative(first.logits, reference), _MOST[scale.dtype]),
        f"fused logits of {len(prompt.ids)} tokens, other bits again": (1.0 - same, 0.0),
    }
    return [
        {"check": name, "error": error, "most": most, "passed": error <= most}
        for name, (error, most) in found.items()
    ]


@dataclass(frozen=True, slots=True)
class _Fused:
    """Logits after the prompt, the rows that were computed, and the seconds of each stage."""

    logits: torch.Tensor
    rows: torch.Tensor
    seconds: dict[str, float]


class _Prompt:
    """Documents with their stored KV, each computed alone, and a query."""

    def __init__(self, host: TransformersHost, scale: Scale, tokens: int) -> None:
        self._host = host
        length, rest = divmod(tokens - scale.query, scale.documents)
        source = torch.Generator().manual_seed(tokens)
        self.ids: list[int] = torch.randint(0, scale.vocabulary, (tokens,), generator=source).tolist()
        self._spans, start = [], 0
        for number in range(scale.documents):
            stop = start + length + (number < rest)
            self._spans.append(Span(start, stop))
            start = stop
        self._query = torch.arange(start, tokens)
        self._placed = [
            PlacedKV(kv=host.extend([], self.ids[span.start : span.stop]), position=span.start)
            for span in self._spans
        ]

    def fused(self, ratio: float, *, rows: torch.Tensor | None = None) -> _Fused:
        """Selects, unless `rows` are given, and fuses; both remap a layer's keys when they first need it."""
        host, count = self._host, self._spans[-1].stop
        started = _now(host)
        stitched = host.stitch(self._placed, capacity=len(self.ids))
        score = host.deviations(stitched, self.ids, rows=torch.arange(len(self.ids)), layer=1)[:count].cpu()
        if rows is None:
            ranked = rank_by_mean(self._spans, score)
            selection = fill_spans(ranked, score=score, k=budget(count, ratio))
            rows = torch.cat((selection, self._query))
        selected = _now(host)
        logits = host.fuse(stitched, self.ids, rows=rows)
        return _Fused(logits, rows, {"select": selected - started, "fuse": _now(host) - selected})


def _host(scale: Scale) -> TransformersHost:
    config = CONFIG_MAPPING["llama"](
        vocab_size=scale.vocabulary,
        hidden_size=scale.hidden,
        intermediate_size=scale.intermediate,
        num_hidden_layers=scale.layers,
        num_attention_heads=scale.heads,
        num_key_value_heads=scale.kv_heads,
        head_dim=scale.head_dim,
        max_position_embeddings=131072,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(scale.device):
        model = AutoModelForCausalLM.from_config(config, dtype=scale.dtype, attn_implementation="sdpa")
    backend = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="a")
    return TransformersHost(model.eval(), tokenizer, name="random weights")


def _seconds(scale: Scale, call: Callable[[], torch.Tensor]) -> float:
    """The median over repeats, after one run that warms up."""
    taken = []
    for _ in range(scale.repeats + 1):
        started = time.perf_counter()
        call()
        if not scale.interpreted:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return median(taken[1:])


def _now(host: TransformersHost) -> float:
    if host.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def _kernels(name: str) -> Iterator[None]:
    """Forces an implementation for a while."""
    before = os.environ["ROLLING_KV_KERNELS"]
    os.environ["ROLLING_KV_KERNELS"] = name
    try:
        yield
    finally:
        os.environ["ROLLING_KV_KERNELS"] = before
