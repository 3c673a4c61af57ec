"""Query probes against the eager attention weights of transformers, and literal sums over them."""

from __future__ import annotations

import random

import pytest
import torch

from rolling_kv.engine.host import TransformersHost
from rolling_kv.engine.kernels import attention_mass
from rolling_kv.engine.probe import probe_anchors, probe_context, probe_query_only
from rolling_kv.engine.stitch import PlacedKV, StitchedKV
from tests.engine.stock import stock_attention


def ids_of(count: int, *, seed: int) -> tuple[int, ...]:
    source = random.Random(seed)
    return tuple(source.randrange(256) for _ in range(count))


CONTEXT, QUERY = ids_of(70, seed=1), ids_of(9, seed=2)
START = len(CONTEXT)


def exact(engine: TransformersHost, *, room: int = len(QUERY)) -> StitchedKV:
    placed = [PlacedKV(kv=engine.extend([], CONTEXT), position=0)]
    return engine.stitch(placed, capacity=START + room)


def stock_weights(engine: TransformersHost) -> list[torch.Tensor]:
    """Every layer's attention weights of the whole prompt, [heads, tokens, tokens], by transformers' eager
    path."""
    with torch.inference_mode(), stock_attention(engine) as model:
        out = model(torch.tensor([[*CONTEXT, *QUERY]]), use_cache=False, output_attentions=True)
    return [weights[0] for weights in out.attentions]


def test_probing_an_exact_context_sees_the_stock_attention(tiny_engine: TransformersHost) -> None:
    weights = stock_weights(tiny_engine)
    for layers in ([0], [3], [1, 4], range(tiny_engine.layers)):
        expected = sum(weights[layer][:, START:, :START].sum(dim=(0, 1)) for layer in layers)
        mass = probe_context(tiny_engine, exact(tiny_engine), QUERY, start=START, layers=layers).sum(0)
        torch.testing.assert_close(mass, expected, atol=1e-4, rtol=1e-4)


def test_probing_leaves_the_context_as_it_was(tiny_engine: TransformersHost) -> None:
    stitched, untouched = exact(tiny_engine), exact(tiny_engine)
    anchors = [PlacedKV(kv=tiny_engine.extend([], CONTEXT), position=0, tokens=torch.tensor([0, 5, 33]))]
    probe_context(tiny_engine, stitched, QUERY, start=START, layers=[2])
    probe_query_only(tiny_engine, stitched, QUERY, start=START, layers=[5])
    probe_anchors(tiny_engine, stitched, QUERY, start=START, layers=[2], anchors=anchors)
    for layer in range(tiny_engine.layers):
        for ours, theirs in zip(stitched.layer(layer), untouched.layer(layer), strict=True):
            assert torch.equal(ours[:, :, :START], theirs[:, :, :START])


def test_all_tokens_as_anchors_are_the_whole_context(tiny_engine: TransformersHost) -> None:
    kv = tiny_engine.extend([], CONTEXT)
    anchors = [PlacedKV(kv=kv, position=0, tokens=torch.arange(START))]
    layers = [1, 3, 5]
    ours = probe_anchors(tiny_engine, exact(tiny_engine), QUERY, start=START, layers=layers, anchors=anchors)
    whole = probe_context(tiny_engine, exact(tiny_engine), QUERY, start=START, layers=layers)
    torch.testing.assert_close(ours, whole, atol=1e-5, rtol=1e-4)


def test_no_anchors_are_the_query_alone(tiny_engine: TransformersHost) -> None:
    layers = [tiny_engine.layers - 1]
    ours = probe_anchors(tiny_engine, exact(tiny_engine), QUERY, start=START, layers=layers, anchors=[])
    alone = probe_query_only(tiny_engine, exact(tiny_engine), QUERY, start=START, layers=layers)
    assert torch.equal(ours, alone)


def test_the_view_conditions_the_query(llama_engine: TransformersHost) -> None:
    """At the first layer the query's states do not depend on the view; deeper they do."""
    kept = torch.tensor([0, 3, 17, 18, 40, 69])
    anchors = [PlacedKV(kv=llama_engine.extend([], CONTEXT), position=0, tokens=kept)]

    def masses(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        stitched = exact(llama_engine)
        ours = probe_anchors(llama_engine, stitched, QUERY, start=START, layers=[layer], anchors=anchors)
        return ours, probe_context(llama_engine, stitched, QUERY, start=START, layers=[layer])

    torch.testing.assert_close(*masses(0), atol=1e-5, rtol=1e-4)
    ours, whole = masses(4)
    assert not torch.allclose(ours, whole, atol=1e-3)


@pytest.mark.parametrize("seed", range(6))
def test_mass_is_its_equation(seed: int) -> None:
    """Against a literal float64 softmax per head and row, on ragged shapes, with gaps and a sliding
    window."""
    source = torch.Generator().manual_seed(seed)
    group, kv_heads, dim = [(1, 1, 8), (3, 2, 16), (2, 3, 4), (4, 1, 8), (1, 4, 8), (2, 2, 6)][seed]
    context, rows = [(1, 1), (31, 5), (64, 1), (7, 9), (50, 3), (20, 20)][seed]
    window = [None, 9, None, 4, 1, 30][seed]
    positions = torch.arange(context + rows) * 2
    query = torch.randn(1, group * kv_heads, rows, dim, generator=source)
    key = torch.randn(1, kv_heads, context + rows, dim, generator=source)
    ours = attention_mass(
        query,
        key,
        rows=positions[context:],
        positions=positions,
        context=context,
        scaling=0.7,
        sliding_window=window,
    )
    expected = torch.zeros(context, dtype=torch.float64)
    for head in range(group * kv_heads):
        for row in range(rows):
            at = int(positions[context + row])
            scores = []
            for j in range(context + rows):
                distance = at - int(positions[j])
                seen = distance >= 0 and (window is None or distance < window)
                dot = float(query[0, head, row].double() @ key[0, head // group, j].double()) * 0.7
                scores.append(dot if seen else float("-inf"))
            expected += torch.tensor(scores, dtype=torch.float64).softmax(-1)[:context]
    torch.testing.assert_close(ours.double(), expected, atol=1e-5, rtol=1e-5)
