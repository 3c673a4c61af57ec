"""The retriever over a session's window: LangChain's suite, and BM25 against its equation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_rolling_kv import RollingKVRetriever
from langchain_rolling_kv.retrievers import bm25
from langchain_tests.integration_tests import RetrieversIntegrationTests
from scripted import tiny_engine

from rolling_kv import RollingSession
from rolling_kv.engine.host import TransformersHost

TEXTS = (
    "Ferrant Steel closed at 518.55 dollars on 4 March 2024.",
    "Mondara Bank closed at 84.10 dollars on 4 March 2024.",
    "Ferrant Steel, and Ferrant Steel alone, opened a plant in Arlen.",
    "Gravell Mining cut 120 jobs.",
    "Wexalo Telecom closed at 828.00 dollars on 5 March 2024.",
)


def session_of(engine: TransformersHost) -> RollingSession:
    session = RollingSession.open(model=engine, window=5, ingest="lazy")
    session.extend(["An old note, evicted by the others.", *TEXTS])
    return session


class TestStandard(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> type[RollingKVRetriever]:
        return RollingKVRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"session": session_of(tiny_engine())}

    @property
    def retriever_query_example(self) -> str:
        return "What did Ferrant Steel close at?"


@pytest.fixture
def session(engine: TransformersHost) -> Iterator[RollingSession]:
    with session_of(engine) as opened:
        yield opened


def test_it_finds_what_is_in_the_window_now(session: RollingSession) -> None:
    retriever = RollingKVRetriever(session=session, k=2)
    best = retriever.invoke("Who cut jobs?")[0]
    assert best.page_content == TEXTS[3]
    assert best.id == session.documents[3].id
    assert best.metadata["position"] == 3
    assert best.metadata["content_hash"] == session.documents[3].content_hash
    assert [found.page_content for found in retriever.invoke("An old note?")] == [TEXTS[4], TEXTS[3]], (
        "newest"
    )
    session.append("Opaline Retail cut its forecast, and cut jobs, jobs, jobs.")
    assert "Opaline" in retriever.invoke("Who cut jobs?")[0].page_content


def test_bm25_is_its_equation() -> None:
    query = "ferrant steel dollars"
    texts = ["Ferrant Steel and steel alone", "steel in dollars", "nothing of all that is here", "dollars"]
    words = [text.lower().split() for text in texts]
    scores = bm25(query, texts)
    average = sum(map(len, words)) / len(words)
    for text, score in zip(words, scores, strict=True):
        expected = 0.0
        for word in query.split():
            n = sum(word in other for other in words)
            weight = math.log(1 + (len(words) - n + 0.5) / (n + 0.5))
            tf = text.count(word)
            expected += weight * tf * 2.5 / (tf + 1.5 * (0.25 + 0.75 * len(text) / average))
        assert score == pytest.approx(expected)
    assert bm25("anything", []) == []
