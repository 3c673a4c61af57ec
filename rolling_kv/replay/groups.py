"""The orders of a request, grouped by the answer they gave."""

from __future__ import annotations

from dataclasses import dataclass

from rolling_kv.replay.parting import Parting, parting_of
from rolling_kv.replay.rows import ReferenceRow, ReplayRow
from rolling_kv.replay.runs import Runs


@dataclass(frozen=True, slots=True)
class AnswerGroup:
    """The orders that gave one answer.

    Args:
        rows: of these orders; there is none where no order gave full prefill's answer.
        faithful: whether it is full prefill's.
        parting: from the first answer that any order gave; None for that answer itself.
    """

    rows: tuple[ReplayRow, ...]
    faithful: bool
    parting: Parting | None

    @property
    def orders(self) -> tuple[str, ...]:
        return tuple(row.order for row in self.rows)


@dataclass(frozen=True, slots=True)
class Differing:
    """A request whose answer differs between orders, with all its answers."""

    reference: ReferenceRow
    answers: tuple[AnswerGroup, ...]


def groups_by_order(runs: Runs, arm: str, request: int) -> dict[str, int]:
    """Order to the number of the answer it gave: 0 is full prefill's, the others count as they first came."""
    rows = [row for order in runs.orders(arm) if (row := runs.arms[arm][order].get(request)) is not None]
    known = {runs.references[request].token_ids: 0}
    return {row.order: known.setdefault(row.token_ids, len(known)) for row in rows}


def differing(runs: Runs, arm: str, *, tolerance: float) -> list[Differing]:
    """The requests whose answers differ between orders, without controls.

    Args:
        tolerance: logits; see `Parting`.
    """
    found = []
    for request, reference in runs.references.items():
        by_order = groups_by_order(runs, arm, request)
        if len(set(by_order.values())) < 2:
            continue
        groups: dict[int, list[ReplayRow]] = {}
        for order, number in sorted(by_order.items(), key=lambda one: one[1]):
            groups.setdefault(number, []).append(runs.arms[arm][order][request])
        first = next(iter(groups.values()))[0]
        answers = tuple(
            AnswerGroup(
                rows=tuple(rows),
                faithful=number == 0,
                parting=parting_of(first, rows[0], reference, tolerance=tolerance),
            )
            for number, rows in groups.items()
        )
        found.append(Differing(reference=reference, answers=answers))
    return found
