"""Pre-roll: are the answers after it full prefill's, and how much sooner do they begin?

Every request rolls the window by one document, as an agent does: the pre-roll of the next window is
completed, the new document is appended, and the question is asked, beside the stock forward of transformers
on the same prompt. The sides take turns at being first. Where the answers differ, the margin between the
reference's two likeliest tokens at the first difference tells a float tie from another answer. A run that was
stopped goes on.

    python benchmarks/preroll.py --window 24 --out benchmarks/results/preroll-smollm2-24
    python benchmarks/preroll.py --window 84 --detail long --requests 5 --out benchmarks/results/preroll-84
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from rolling_kv import Answer, RollingSession, load_engine
from rolling_kv.bench.conditions import conditions
from rolling_kv.bench.rows import Rows
from rolling_kv.bench.statistics import require_statistics, share_of
from rolling_kv.cli.model import about
from rolling_kv.workloads.market import INSTRUCTION, MarketQuestion, market_events, market_question


def main() -> None:
    options = _options()
    require_statistics()
    engine = load_engine(options.model, dtype=options.dtype)
    settings = {name: getattr(options, name) for name in ("window", "seed", "detail")}
    kept = {"kind": "preroll"} | settings | conditions(engine)
    with Rows(options.out / "rows.jsonl", settings=kept) as rows:
        _run(engine, options, rows)
        report = about(engine)
        report |= {"command": " ".join(["python", *sys.argv]), "settings": settings} | _summary(rows.rows)
    (options.out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))


def _run(engine: Any, options: argparse.Namespace, rows: Rows) -> None:
    stream = market_events(options.seed, detail=options.detail)
    done = len(rows.rows)
    events = list(islice(stream, options.window + done))[done:]
    with RollingSession.open(
        model=engine, instruction=INSTRUCTION, window=options.window, preroll="wait"
    ) as session:
        session.extend([event.text for event in events], ids=[event.id for event in events])
        session._background.ask_to_stop()  # or a part of the pre-roll would be done where nobody times it
        for number in range(done, options.requests):
            started = time.perf_counter()
            rolled = session.preroll()
            roll_seconds = time.perf_counter() - started
            event = next(stream)
            events = [*events[1:], event]
            started = time.perf_counter()
            change = session.append(event.text, id=event.id)
            append_seconds = time.perf_counter() - started
            question = market_question(events, seed=options.seed, step=number)
            row = _row(session, question, full_first=number % 2 == 0)
            row |= {"preroll_seconds": roll_seconds, "preroll_tokens": rolled.computed}
            row |= {"append_seconds": append_seconds, "append_tokens": change.computed}
            rows.add(row)
            times = f"full prefill {row['full_ttft']:.2f} s, after the pre-roll {row['ttft']:.3f} s"
            _say(f"{number + 1} of {options.requests}: {times}, the same answer: {row['same']}")


def _row(session: RollingSession, question: MarketQuestion, *, full_first: bool) -> dict[str, Any]:
    def ask(**options: Any) -> Answer:
        return session.ask(
            question.query, answer_prefix=question.answer_prefix, max_new_tokens=16, stop="\n", **options
        )

    if full_first:
        full, answer = ask(policy="full-prefill"), ask()
    else:
        answer, full = ask(), ask(policy="full-prefill")
    assert answer.usage.reused == answer.usage.recomputed == 0, "everything but the query is exact prefix"
    same = answer.token_ids == full.token_ids
    return {
        "same": same,
        "margin": None if same else _margin(session, question, full, answer),
        "ttft": answer.timing.ttft,
        "full_ttft": full.timing.ttft,
        "prompt_tokens": full.usage.prompt_tokens,
        "prefix": answer.usage.prefix,
        "computed": answer.usage.computed,
        "right": question.is_right(full.text),
    }


def _margin(session: RollingSession, question: MarketQuestion, full: Answer, answer: Answer) -> float:
    """Between the reference's two likeliest tokens where the answers part, in logits."""
    ours, theirs = answer.token_ids, full.token_ids
    shorter = min(len(ours), len(theirs))
    at = next((n for n in range(shorter) if ours[n] != theirs[n]), shorter)
    forced = session.score(
        question.query, theirs[:at], answer_prefix=question.answer_prefix, policy="full-prefill"
    )
    best = forced.logits[-1].topk(2).values
    return float(best[0] - best[1])


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ratios = [row["full_ttft"] / row["ttft"] for row in rows]
    return {
        "requests": len(rows),
        "same_answer": asdict(share_of([row["same"] for row in rows])),
        "margins_where_not": [row["margin"] for row in rows if not row["same"]],
        "full_prefill_right": sum(row["right"] for row in rows),
        "prompt_tokens_median": median(row["prompt_tokens"] for row in rows),
        "full_ttft_median": median(row["full_ttft"] for row in rows),
        "ttft_median": median(row["ttft"] for row in rows),
        "speedup_median": median(ratios),
        "speedup_range": [min(ratios), max(ratios)],
        "append_seconds_median": median(row["append_seconds"] for row in rows),
        "preroll_seconds_median": median(row["preroll_seconds"] for row in rows),
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--window", type=int, default=24)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--detail", choices=("short", "long"), default="short")
    parser.add_argument("--out", type=Path, required=True, help="A folder for rows.jsonl and report.json.")
    return parser.parse_args()


if __name__ == "__main__":
    main()
