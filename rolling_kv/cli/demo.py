"""`rolling-kv demo`: a market-watching agent over a rolling window, beside full prefill at every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from statistics import median
from typing import Annotated, Any

import typer
from rich.markup import escape

from rolling_kv.answer import Answer, Timing, Usage
from rolling_kv.cli.options import (
    DEFAULT_CONDITIONING,
    DEFAULT_POLICY,
    ConditioningOption,
    DeviceOption,
    DtypeOption,
    FreshTailOption,
    JsonOption,
    ModelOption,
    PolicyOption,
    RatioOption,
)
from rolling_kv.cli.output import print_json, progress_bar, results
from rolling_kv.errors import ConfigError
from rolling_kv.session import RollingSession
from rolling_kv.workloads.market import (
    INSTRUCTION,
    MarketEvent,
    MarketQuestion,
    market_events,
    market_question,
)


@dataclass(frozen=True, slots=True)
class DemoStep:
    """One rolling step: an event arrives, the oldest goes, and a question is asked both ways."""

    appended: str
    evicted: tuple[str, ...]
    append_tokens: int
    append_seconds: float
    question: str
    expected: str
    answer: str
    right: bool
    full_prefill_answer: str
    full_prefill_right: bool
    agrees: bool
    full_prefill_ttft: float
    speedup: float
    usage: Usage
    timing: Timing


def demo(
    steps: Annotated[int, typer.Option(help="Rolling steps.")] = 10,
    window: Annotated[int, typer.Option(help="Documents in the window.")] = 24,
    seed: Annotated[int, typer.Option(help="Of the stream of events.")] = 6,
    model: ModelOption = "demo",
    policy: PolicyOption = DEFAULT_POLICY,
    ratio: RatioOption = None,
    conditioning: ConditioningOption = DEFAULT_CONDITIONING,
    fresh_tail: FreshTailOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Runs an agent over a stream of invented market events, and the same prompts by full prefill.

    At every step one event is appended, the oldest is evicted, and one question is asked. Both answers, both
    times to the first token (TTFT) and the account of every prompt token are shown.
    """
    if steps < 1:
        raise ConfigError(f"--steps is {steps}; expected at least 1.")
    with progress_bar() as progress:
        session = RollingSession.open(
            model=model,
            instruction=INSTRUCTION,
            window=window,
            policy=policy,
            ratio=ratio,
            conditioning=conditioning,
            fresh_tail=fresh_tail,
            dtype=dtype,
            device=device,
            progress=progress,
        )
    done: list[DemoStep] = []
    with session:
        for step in run(session, steps=steps, seed=seed):
            done.append(step)
            if not as_json:
                show(step, number=len(done))
        settings = session.config.model_dump(
            mode="json", include={"window", "policy", "ratio", "conditioning", "fresh_tail"}
        )
        identity = asdict(session.engine.identity)
    outcome = summary(done)
    if as_json:
        print_json(
            {
                "model": identity,
                "settings": settings | {"seed": seed},
                "steps": [asdict(step) for step in done],
                "summary": outcome,
            }
        )
    else:
        results.print(summary_line(outcome), highlight=False)


def run(session: RollingSession, *, steps: int, seed: int) -> Iterator[DemoStep]:
    """Fills the window of `session`, then yields one step after the other."""
    size = session.config.window
    assert size is not None, "the demo's window is bounded by documents"
    stream = market_events(seed)
    events = list(islice(stream, size))
    with progress_bar() as progress:
        session.extend(
            [event.text for event in events],
            ids=[event.id for event in events],
            progress=lambda done, total: progress("filling the window", done / total),
        )
    for number in range(steps):
        event = next(stream)
        events = [*events[1:], event]
        yield _step(
            session, event, market_question(events, seed=seed, step=number), rolling_first=number % 2 == 0
        )


def _step(
    session: RollingSession, event: MarketEvent, question: MarketQuestion, *, rolling_first: bool
) -> DemoStep:
    """One step; which of the two ways is timed first alternates, so that neither is favoured by caches."""
    started = session.clock()
    change = session.append(event.text, id=event.id)
    append_seconds = session.clock() - started

    def rolling() -> Answer:
        return _ask(session.ask, question)

    def full() -> Answer:
        return _ask(session.ask, question, policy="full-prefill")

    if rolling_first:
        answer, reference = rolling(), full()
    else:
        reference, answer = full(), rolling()
    return DemoStep(
        appended=event.id,
        evicted=change.evicted,
        append_tokens=change.computed,
        append_seconds=append_seconds,
        question=question.query.strip(),
        expected=question.expected,
        answer=answer.text.strip(),
        right=question.is_right(answer.text),
        full_prefill_answer=reference.text.strip(),
        full_prefill_right=question.is_right(reference.text),
        agrees=answer.text == reference.text,
        full_prefill_ttft=reference.timing.ttft,
        speedup=reference.timing.ttft / answer.timing.ttft,
        usage=answer.usage,
        timing=answer.timing,
    )


def _ask(ask: Callable[..., Answer], question: MarketQuestion, **options: Any) -> Answer:
    return ask(
        question.query,
        answer_prefix=question.answer_prefix,
        max_new_tokens=32,
        stop=("\n", " on "),
        **options,
    )


def summary(steps: Sequence[DemoStep]) -> dict[str, float | int]:
    """The figures of a run; shares are of the steps."""
    count = len(steps)
    return {
        "steps": count,
        "ttft_median": median(step.timing.ttft for step in steps),
        "full_prefill_ttft_median": median(step.full_prefill_ttft for step in steps),
        "ttft_speedup_median": median(step.speedup for step in steps),
        "append_seconds_median": median(step.append_seconds for step in steps),
        "agreement": sum(step.agrees for step in steps) / count,
        "right": sum(step.right for step in steps) / count,
        "full_prefill_right": sum(step.full_prefill_right for step in steps) / count,
    }


def summary_line(outcome: dict[str, float | int]) -> str:
    steps = int(outcome["steps"])
    agreeing, right, full = (
        round(outcome[share] * steps) for share in ("agreement", "right", "full_prefill_right")
    )
    return (
        f"[bold]{steps} steps: first token {outcome['ttft_speedup_median']:.1f} times sooner than full "
        f"prefill (medians {outcome['ttft_median']:.2f} s and {outcome['full_prefill_ttft_median']:.2f} s), "
        f"after {outcome['append_seconds_median']:.2f} s at append; {agreeing} of {steps} answers equal full "
        f"prefill's, {right} right (full prefill {full}).[/bold]"
    )


def show(step: DemoStep, *, number: int) -> None:
    """Prints a step as a few lines that fit 80 columns."""
    usage, timing = step.usage, step.timing
    question = step.question.removeprefix("Question:").removesuffix("Answer:").strip()
    evicted = ", ".join(step.evicted) or "nothing"
    verdict = "[green]the same answer[/green]" if step.agrees else "[red]another answer[/red]"
    lines = (
        f"[bold]{number:>2}[/bold]  + {step.appended}  - {evicted}",
        f"    {escape(question)}",
        f"    rolling       {timing.ttft:5.2f} s  {_judged(step.answer, right=step.right)}",
        f"    full prefill  {step.full_prefill_ttft:5.2f} s  "
        f"{_judged(step.full_prefill_answer, right=step.full_prefill_right)}",
        f"    {step.speedup:.1f} times sooner, {verdict}; "
        f"append: {step.append_tokens} tokens computed in {step.append_seconds:.1f} s",
        f"    [dim]{usage.prompt_tokens} tokens: {usage.prefix} prefix, {usage.reused} reused, "
        f"{usage.recomputed} recomputed, {usage.computed} computed[/dim]",
    )
    for line in lines:
        results.print(line, highlight=False)


def _judged(answer: str, *, right: bool) -> str:
    return escape(answer) + ("" if right else "  [red](wrong)[/red]")
