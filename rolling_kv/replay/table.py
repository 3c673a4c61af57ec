"""What a replay found, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from rolling_kv.replay.groups import differing
from rolling_kv.replay.parting import Parting, sentence
from rolling_kv.replay.runs import CHRONOLOGICAL

if TYPE_CHECKING:
    from rolling_kv.bench.statistics import Share
    from rolling_kv.replay.report import ReplayReport


def table(report: ReplayReport) -> Table:
    """Two lines an arm, in 80 columns; the report has all figures."""
    requests, orders = len(report.runs.references), len(report.runs.all_orders())
    title = f"{requests} requests in {orders} order{'' if orders == 1 else 's'}, with 95% intervals"
    found = Table(box=None, pad_edge=False, padding=(0, 1), title=title, title_justify="left")
    found.add_column("arm", overflow="fold")
    for column in ("variation", "equal to\nfull prefill", "worst\norder", "bits\ndiffer", "KL", "TTFT"):
        found.add_column(column, justify="right")
    for arm in report.arms:
        worst = min(arm.orders, key=lambda one: one.fidelity.share)
        found.add_row(
            Text(arm.arm.replace(":", "\n:", 1)),
            _interval(arm.variation),
            _interval(arm.total.fidelity),
            Text(f"{worst.fidelity.share:.2f}\n{worst.order}"),
            "" if arm.logits_differ is None else f"{arm.logits_differ.hits} of\n{arm.logits_differ.count}",
            f"{arm.total.kl:.3f}",
            f"{arm.total.ttft_median * 1000:.0f} ms\n{arm.total.speedup:.1f}x",
        )
    return found


def notes(report: ReplayReport) -> Iterator[str]:
    """What must not be missed beside the table: controls, gaps, and what did not run as asked."""
    if report.right is not None:
        yield f"Full prefill itself gave the expected answer to {report.right.hits} of {report.right.count}."
    yield from _controls(report)
    if report.crowd is not None:
        yield report.crowd
    for arm in report.arms:
        for order, count in arm.missing.items():
            total = len(report.runs.references)
            yield f"{arm.arm}: {order!r} lacks {count} of {total} requests; figures are over the others."
        for reason in arm.degraded:
            yield f"{arm.arm}: {reason}"


def details(report: ReplayReport) -> Iterator[str]:
    """Every request whose answer differs between orders: the answers, and where they part from the first."""
    for arm in report.arms:
        for one in differing(report.runs, arm.arm, tolerance=report.tie_tolerance):
            yield f"{arm.arm}, request {one.reference.request}:"
            for answer in one.answers:
                same = " (full prefill's)" if answer.faithful else ""
                yield f"  {', '.join(answer.orders)}: {answer.rows[0].text!r}{same}"
                if answer.parting is not None:
                    yield f"    from {answer.parting.orders[0]}, {sentence(answer.parting)}"


def describe(parting: Parting) -> str:
    """A parting with its request, orders and both answers, a line each."""
    first, second = parting.orders
    return (
        f"request {parting.request}: {first} and {second} differ\n"
        f"  {first}: {parting.texts[0]!r}\n"
        f"  {second}: {parting.texts[1]!r}\n"
        f"  {sentence(parting)}"
    )


def _controls(report: ReplayReport) -> Iterator[str]:
    exact = [arm.arm for arm in report.arms if arm.repeat is not None and arm.repeat.exact]
    if exact:
        yield f"A repeat of {CHRONOLOGICAL} was the same bit by bit, KV and logits too: {', '.join(exact)}."
    for arm in report.arms:
        if arm.repeat is not None and not arm.repeat.exact:
            yield (
                f"{arm.arm}: a repeat of {CHRONOLOGICAL} was NOT the same: of {arm.repeat.requests} requests "
                f"{arm.repeat.answers} differ in the answer, {arm.repeat.logits} in logits, "
                f"{arm.repeat.kv} in KV."
            )
    reset = [f"{arm.arm} {arm.reset.fidelity}" for arm in report.arms if arm.reset is not None]
    if reset:
        yield f"Equal to full prefill with the store reset before each request: {', '.join(reset)}."


def _interval(share: Share | None) -> str:
    return "" if share is None else f"{share.share:.2f}\n{share.low:.2f}-{share.high:.2f}"
