"""Time to the first token: the stock forward of transformers beside rolling reuse, on the same requests.

Every request rolls the window by one document. The sides take turns within a request, in an order that
alternates from request to request; medians are over requests, ratios are of one request's two times.

    python benchmarks/ttft.py --out benchmarks/results/ttft.json
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch

from rolling_kv import RollingSession, load_engine
from rolling_kv.workloads.market import INSTRUCTION, copy_question, market_events


def main() -> None:
    options = _options()
    engine = load_engine(options.model, dtype=options.dtype, device="cpu")
    stream = market_events(options.seed, detail="long")
    events = list(islice(stream, options.window))
    arms = [tuple(arm.split("@")) for arm in options.arms]
    sessions = {conditioning: _session(engine, options, conditioning) for _, conditioning in arms}
    for conditioning, session in sessions.items():
        started = time.perf_counter()
        session.extend([event.text for event in events], ids=[event.id for event in events])
        _say(f"filled the window under {conditioning} in {time.perf_counter() - started:.0f} s")
    rows: list[dict[str, Any]] = []
    for number in range(options.requests + 1):  # the first request warms up and is not counted
        event = next(stream)
        events = [*events[1:], event]
        appended = {}
        for conditioning, session in sessions.items():
            started = time.perf_counter()
            session.append(event.text, id=event.id)
            appended[conditioning] = time.perf_counter() - started
        question = copy_question(events, seed=options.seed, step=number)
        row = _request(sessions, arms, question, options.ratio, full_first=number % 2 == 0)
        row["append_seconds"] = appended
        if number:
            rows.append(row)
        _say(f"request {number} of {options.requests}: " + _line(row))
    report = _report(engine, options, rows)
    print(json.dumps(report, indent=2))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _session(engine: Any, options: argparse.Namespace, conditioning: str) -> RollingSession:
    return RollingSession.open(
        model=engine, instruction=INSTRUCTION, window=options.window, conditioning=conditioning
    )


def _request(
    sessions: dict[str, RollingSession], arms: list[Any], question: Any, ratio: float, *, full_first: bool
) -> dict[str, Any]:
    def full() -> dict[str, Any]:
        session = next(iter(sessions.values()))
        return _timed(session, question, policy="full-prefill", ratio=ratio)

    row: dict[str, Any] = {}
    if full_first:
        row["full-prefill"] = full()
    for policy, conditioning in arms:
        row[f"{policy}@{conditioning}"] = _timed(sessions[conditioning], question, policy=policy, ratio=ratio)
    if not full_first:
        row["full-prefill"] = full()
    return row


def _timed(session: RollingSession, question: Any, *, policy: str, ratio: float) -> dict[str, Any]:
    answer = session.ask(
        question.query, answer_prefix=question.answer_prefix, policy=policy, ratio=ratio, max_new_tokens=1
    )
    timing = answer.timing
    return {
        "ttft": timing.ttft,
        "phases": {"load": timing.load, "select": timing.select, "fuse": timing.fuse},
        "prompt_tokens": answer.usage.prompt_tokens,
        "recomputed": answer.usage.recomputed,
        "first_token": answer.token_ids[0] if answer.token_ids else None,
    }


def _line(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {one['ttft']:.2f} s" for name, one in row.items() if name != "append_seconds")


def _report(engine: Any, options: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    full = [row["full-prefill"]["ttft"] for row in rows]
    arms = {}
    for name in rows[0]:
        if name in ("append_seconds", "full-prefill"):
            continue
        one = [row[name] for row in rows]
        ratios = [row["full-prefill"]["ttft"] / row[name]["ttft"] for row in rows]
        arms[name] = {
            "ttft_median": median(x["ttft"] for x in one),
            "speedup_median": median(ratios),
            "speedups": ratios,
            "phases_median": {p: median(x["phases"][p] for x in one) for p in ("load", "select", "fuse")},
            "same_first_token": sum(
                x["first_token"] == row["full-prefill"]["first_token"]
                for x, row in zip(one, rows, strict=True)
            ),
            "append_seconds_median": median(row["append_seconds"][name.split("@")[1]] for row in rows),
        }
    return {
        "command": " ".join(["python", *sys.argv]),
        "hardware": f"{platform.machine()}, {torch.get_num_threads()} threads, "
        f"{torch.backends.cpu.get_cpu_capability()}",
        "versions": {name: version(name) for name in ("torch", "transformers", "rolling-kv")},
        "model": engine.name,
        "dtype": engine.identity.dtype,
        "window": options.window,
        "ratio": options.ratio,
        "requests": len(rows),
        "prompt_tokens_median": median(row["full-prefill"]["prompt_tokens"] for row in rows),
        "full_prefill_ttft_median": median(full),
        "arms": arms,
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--window", type=int, default=84)
    parser.add_argument("--requests", type=int, default=5)
    parser.add_argument("--ratio", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--arms",
        nargs="+",
        default=[
            "document-aligned@isolated",
            "token-topk@isolated",
            "document-aligned@window:3",
            "direct-reuse@window:3",
        ],
        help="policy@conditioning",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
