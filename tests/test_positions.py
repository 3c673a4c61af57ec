"""Conditioning where layers slide: what lies further in than their window has not seen the instruction."""

from __future__ import annotations

from itertools import pairwise

import torch

from rolling_kv import RollingSession
from rolling_kv.engine.host import TransformersHost
from rolling_kv.kv import SegmentKV
from rolling_kv.plan import StoredSegment
from tests.engine.stock import stock_kv
from tests.settings import REPAIRING
from tests.tiny_models import tiny_model, tiny_tokenizer

INSTRUCTION = "Answer from the notes."
QUERY = "Which number did note 3 say?"


def note(number: int) -> str:
    return f"Note {number} of the day says {number * 7919 % 1000}."


def sliding(family: str = "mistral") -> TransformersHost:
    """All layers of the tiny mistral slide by 48 tokens; of the tiny gemma3 most, by 24."""
    return TransformersHost(tiny_model(family), tiny_tokenizer(), name=f"tiny-{family}")


def opened(engine: TransformersHost, **options: object) -> RollingSession:
    settings = REPAIRING | {"instruction": INSTRUCTION, "conditioning": "window:1"} | options
    return RollingSession.open(model=engine, **settings)  # type: ignore[arg-type]


def parts_of(session: RollingSession) -> list[tuple[StoredSegment, SegmentKV]]:
    plan = session._planner.plan(session.prompt(QUERY))
    kv, _ = session._ingestor.ensure(plan.stored)
    return list(zip(plan.stored, kv, strict=True))


def gap_of(part: StoredSegment) -> int:
    first, *rest = part.lineage.path
    return rest[0].start - len(first.token_ids) if rest else 0


def test_the_window_is_read_from_the_configuration(llama_engine: TransformersHost) -> None:
    assert sliding().sliding_window == 48
    assert sliding("gemma3_text").sliding_window == 24
    assert llama_engine.sliding_window is None


def test_far_documents_are_computed_a_window_away_and_near_ones_behind_the_instruction() -> None:
    with opened(sliding()) as session:
        session.extend([note(n) for n in range(6)])
        parts = [part for part, _ in parts_of(session)]
        instruction = len(parts[0].segment.token_ids)
        for previous, part in pairwise(parts):
            neighbour = previous.segment.start if previous.segment.kind == "document" else part.segment.start
            assert gap_of(part) == (48 if neighbour - instruction >= 48 else 0)
        assert {gap_of(part) for part in parts} == {0, 48}
        assert [part.exact for part in parts] == [True, True, True, False, False, False, False]
        far = parts[-1].lineage.key
    with opened(sliding(), positions="packed") as session:
        session.extend([note(n) for n in range(6)])
        parts = [part for part, _ in parts_of(session)]
        assert {gap_of(part) for part in parts} == {0}
        assert parts[-1].lineage.key != far, "the lineage says which"


def test_a_far_document_has_not_seen_the_instruction() -> None:
    """Where all layers slide it is what the stock model makes of neighbour and document alone."""
    engine = sliding()
    with opened(engine) as session:
        session.extend([note(n) for n in range(6)])
        (neighbour, _), (_, kv) = parts_of(session)[-2:]
    alone = stock_kv(engine, [*neighbour.segment.token_ids, *kv.token_ids])
    with opened(engine, positions="packed") as session:
        session.extend([note(n) for n in range(6)])
        packed = parts_of(session)[-1][1]
    at = len(neighbour.segment.token_ids)
    for layer, (_, values) in enumerate(alone):
        torch.testing.assert_close(kv.v[layer], values[:, at:], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(packed.v[-1], alone[-1][1][:, at:], atol=1e-3)


def test_the_left_edge_was_stored_when_what_stood_behind_it_came_near() -> None:
    """So losing the oldest computes what comes near, after its neighbour, and nothing else."""
    with opened(sliding()) as session:
        session.extend([note(n) for n in range(8)])
        for number in range(8, 14):
            known = {part.lineage.key for part, _ in parts_of(session)}
            computed = session.evict(session.documents[0].id).computed
            changed = [part for part, _ in parts_of(session) if part.lineage.key not in known]
            near = [part for part in changed if not part.exact]
            assert len(near) < len(changed), "the edge changed, too"
            assert computed == sum(len(step.token_ids) for part in near for step in part.lineage.path[1:])
            session.append(note(number))


def test_true_positions_come_nearer_to_the_full_prefill() -> None:
    """Values of far documents, over both families; closeness is the norm of the difference."""
    for family in ("mistral", "gemma3_text"):
        engine = sliding(family)
        distance = {}
        for positions in ("true", "packed"):
            with opened(engine, positions=positions, conditioning="window:2") as session:
                session.extend([note(n) for n in range(8)])
                full = stock_kv(engine, session.prompt_token_ids(QUERY))
                distance[positions] = sum(
                    float((full[-1][1][:, part.segment.start : part.segment.stop] - kv.v[-1]).norm())
                    for part, kv in parts_of(session)[-3:]
                )
        assert distance["true"] < distance["packed"]


def test_history_leaves_no_trace_in_it() -> None:
    """A document that the window rolls from far to near is computed anew, the same as at once."""
    engine = sliding("gemma3_text")
    found = set()
    for history in ([], [0, 1], [8, 7, 6, 5, 4]):
        with opened(engine, window=5, policy="qcfuse", ratio=0.2) as session:
            for number in [*history, 3, 4, 5, 6, 7]:
                session.append(note(number))
            found.add(session.next_token_logits(QUERY).numpy().tobytes())
    assert len(found) == 1
