"""An agent that watches a market: every event is appended, the oldest is evicted, and a question is asked.

    python examples/agents/market_watch.py

It runs on a demo model, on a CPU, without a network. The events are invented (`rolling_kv.workloads.market`).
"""

from __future__ import annotations

import argparse
from collections import deque
from itertools import islice

from rolling_kv import RollingSession
from rolling_kv.workloads.market import market_events, market_question


def watch(session: RollingSession, *, window: int, steps: int, seed: int) -> None:
    """Fills the window, then rolls it by one event a step and asks about what it holds."""
    events = market_events(seed)
    held = deque(islice(events, window), maxlen=window)
    session.extend([event.text for event in held], ids=[event.id for event in held])
    for step, event in enumerate(islice(events, steps)):
        held.append(event)
        change = session.append(event.text, id=event.id)
        question = market_question(list(held), seed=seed, step=step)
        answer = session.ask(
            question.query, answer_prefix=question.answer_prefix, max_new_tokens=16, stop=["\n"]
        )
        usage, verdict = answer.usage, "right" if question.is_right(answer.text) else "wrong"
        print(f"+ {change.document_id}  - {', '.join(change.evicted)}  ({change.computed} tokens computed)")
        print(f"  {question.query.strip().splitlines()[0]}")
        print(f"  {question.answer_prefix.strip()}{answer.text}  ({verdict})")
        print(
            f"  first token after {answer.timing.ttft:.2f} s; of {usage.prompt_tokens} prompt tokens "
            f"{usage.prefix} were exact prefix, {usage.reused} reused, {usage.recomputed} recomputed, "
            f"{usage.computed} new"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo", help="a folder, a hub id or a demo model")
    parser.add_argument("--window", type=int, default=12, help="documents")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seed", type=int, default=6, help="of the stream of events")
    given = parser.parse_args()
    with RollingSession.open(
        model=given.model,
        instruction="You are a market analyst. Answer from the records.",
        window=given.window,
    ) as session:
        watch(session, window=given.window, steps=given.steps, seed=given.seed)


if __name__ == "__main__":
    main()
