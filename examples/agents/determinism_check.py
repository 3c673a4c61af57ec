"""An agent that is recorded, and replayed in other orders to see whether its answers depend on the order.

    python examples/agents/determinism_check.py --out report

It records a small rolling agent (`trace=`), replays the trace under the agent's own settings and, as a
control, in the way whose answers do depend on history, and writes `report/report.html`. It runs on a demo
model, on a CPU, without a network, in a few minutes. `rolling-kv replay TRACE` is the same as a command.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from itertools import islice
from pathlib import Path

from rich.console import Console

from rolling_kv import RollingSession, load_engine
from rolling_kv.bench.arms import SESSION, parse_arms
from rolling_kv.engine.host import TransformersHost
from rolling_kv.replay.history import history_of_traces
from rolling_kv.replay.orders import parse_orders
from rolling_kv.replay.report import ReplayReport, details, notes, summarise, table, write_report
from rolling_kv.replay.runner import ReplayRun, replay
from rolling_kv.replay.trace import read_trace
from rolling_kv.workloads.market import INSTRUCTION, market_events, market_question

CONTROL = "token-topk@0.05:first-seen"


def record(engine: TransformersHost, path: Path, *, window: int, requests: int) -> None:
    """An agent that appends an event and asks about the window, again and again."""
    with RollingSession.open(model=engine, instruction=INSTRUCTION, window=window, trace=path) as session:
        events = market_events(seed=0)
        held = deque(islice(events, window - 1), maxlen=window)
        session.extend([event.text for event in held], ids=[event.id for event in held])
        for step, event in enumerate(islice(events, requests)):
            held.append(event)
            session.append(event.text, id=event.id)
            question = market_question(list(held), seed=0, step=step)
            answer = session.ask(
                question.query,
                answer_prefix=question.answer_prefix,
                max_new_tokens=12,
                stop=[" dollars", "\n"],
            )
            kept, total = answer.usage.prefix + answer.usage.reused, answer.usage.prompt_tokens
            print(f"request {step}: {answer.text.strip()}  ({kept} of {total} prompt tokens were reused)")


def check(engine: TransformersHost, trace: Path, *, orders: str, out: Path) -> ReplayReport:
    """Replays the trace, each arm and order from an empty store, and writes what was found."""
    history = history_of_traces([read_trace(trace)])
    run = ReplayRun(parse_arms([SESSION, CONTROL]), parse_orders(orders, count=len(history)))

    def progress(done: int, total: int, what: str) -> None:
        print(f"\r{done} of {total}: {what}\033[K", end="", file=sys.stderr, flush=True)

    replayed = replay(engine, history, run, out=out, progress=progress)
    print(file=sys.stderr)
    report = summarise(replayed.references, replayed.rows, settings={"source": history.source})
    write_report(report, out)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo", help="a folder, a hub id or a demo model")
    parser.add_argument("--window", type=int, default=8, help="documents")
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--orders", default="chronological,reversed,random:0")
    parser.add_argument(
        "--out", type=Path, default=Path("determinism"), help="a folder; it must not be there"
    )
    given = parser.parse_args()
    if given.out.exists():
        parser.error(f"{given.out} is there already; give --out a new folder")
    engine, trace = load_engine(given.model), given.out / "run.jsonl"
    record(engine, trace, window=given.window, requests=given.requests)
    report = check(engine, trace, orders=given.orders, out=given.out)
    Console().print(table(report))
    print(*notes(report), *details(report), sep="\n")
    print(f"Written to {given.out}: report.html, report.json and plots; run.jsonl is the trace.")
    if report.variation(SESSION).hits:
        raise SystemExit("The agent's answers depend on the order of its requests.")


if __name__ == "__main__":
    main()
