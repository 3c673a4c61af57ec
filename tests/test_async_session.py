"""The asynchronous session gives the same answers, and leaves the event loop free."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from rolling_kv import AsyncRollingSession, RollingSession
from rolling_kv.engine.host import TransformersHost
from rolling_kv.errors import UnknownDocumentError

TEXTS = [f"Note {n} says {n * 31}." for n in range(6)]


def test_it_answers_as_the_session_does(llama_engine: TransformersHost) -> None:
    async def run() -> tuple[str, str, str]:
        async with await AsyncRollingSession.open(
            model=llama_engine, instruction="Be brief.", window=4
        ) as session:
            for text in TEXTS:
                await session.append(text)
            asked = await session.ask("Well?", max_new_tokens=8)
            stream = await session.stream("Well?", max_new_tokens=8)
            pieces = [piece async for piece in stream]
            assert stream.answer.token_ids == asked.token_ids
            return asked.text, "".join(pieces), asked.trace.logits_fingerprint

    asked, streamed, fingerprint = asyncio.run(run())
    with RollingSession.open(model=llama_engine, instruction="Be brief.", window=4) as session:
        session.extend(TEXTS)
        expected = session.ask("Well?", max_new_tokens=8)
    assert asked == streamed == expected.text
    assert fingerprint == expected.trace.logits_fingerprint


def test_calls_at_once_take_turns(llama_engine: TransformersHost) -> None:
    async def run() -> int:
        async with await AsyncRollingSession.open(model=llama_engine, window=None) as session:
            await asyncio.gather(*(session.append(text) for text in TEXTS))
            await session.evict(session.documents[0].id)
            await session.extend(["Two more.", "And one."])
            with pytest.raises(UnknownDocumentError):
                await session.evict("nothing")
            answers = await asyncio.gather(*(session.ask("Well?", max_new_tokens=2) for _ in range(3)))
            assert len({answer.trace.logits_fingerprint for answer in answers}) == 1
            return len(session.documents)

    assert asyncio.run(run()) == 7


def test_every_method_of_the_session_is_there() -> None:
    """With the same parameters, so that nothing is lost when an agent becomes asynchronous."""
    for name, method in inspect.getmembers(RollingSession, inspect.isfunction):
        if not name.startswith("_"):
            own = inspect.signature(getattr(AsyncRollingSession, name))
            assert list(own.parameters) == list(inspect.signature(method).parameters), name
