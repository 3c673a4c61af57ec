"""The rows of a replay, by arm, order and request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from rolling_kv.errors import BenchError
from rolling_kv.replay.rows import ReferenceRow, ReplayRow

CHRONOLOGICAL = "chronological"
REPEAT = "repeat"
"""A control: the chronological order once more, by itself. It tells history from a run that varies anyway."""
RESET = "reset"
"""A control: the store is emptied before each request, so that no history is left."""
CONTROLS = (REPEAT, RESET)

RowPair = tuple[ReplayRow, ReplayRow]


@dataclass(frozen=True, slots=True)
class Runs:
    """What was measured. Controls are orders by name, and never part of the pairs of orders.

    Args:
        references: by request.
        arms: arm to order to request to row; arms and orders as they first came.
    """

    references: dict[int, ReferenceRow]
    arms: dict[str, dict[str, dict[int, ReplayRow]]]

    def orders(self, arm: str) -> tuple[str, ...]:
        """The orders of an arm, without controls."""
        return tuple(order for order in self.arms[arm] if order not in CONTROLS)

    def all_orders(self) -> tuple[str, ...]:
        """The orders of all arms, without controls."""
        return tuple(dict.fromkeys(order for arm in self.arms for order in self.orders(arm)))

    def rows(self, arm: str) -> list[ReplayRow]:
        """All rows of an arm but those of controls."""
        return [row for order in self.orders(arm) for row in self.arms[arm][order].values()]

    def by_request(self, arm: str) -> dict[int, list[ReplayRow]]:
        """The rows of each request, one an order, without controls."""
        found: dict[int, list[ReplayRow]] = {}
        for row in self.rows(arm):
            found.setdefault(row.request, []).append(row)
        return dict(sorted(found.items()))

    def pairs(self, arm: str) -> Iterator[tuple[int, list[RowPair]]]:
        """Each request that at least two orders hold, with all its pairs of orders."""
        for request, rows in self.by_request(arm).items():
            if len(rows) > 1:
                yield request, list(combinations(rows, 2))

    def missing(self, arm: str) -> dict[str, int]:
        """How many requests each order lacks, where it lacks any."""
        counts = {order: len(self.references) - len(rows) for order, rows in self.arms[arm].items()}
        return {order: count for order, count in counts.items() if count}


def runs_of(references: Sequence[ReferenceRow], rows: Sequence[ReplayRow]) -> Runs:
    """Sorts rows by arm, order and request.

    Raises:
        BenchError: rows are missing, double, or of another prompt than their reference.
    """
    if not rows:
        raise BenchError("There are no replayed requests to report on. Run the replay first.")
    by_request = {reference.request: reference for reference in references}
    if len(by_request) != len(references):
        raise BenchError("A request has two references. Delete the rows, and run the replay anew.")
    arms: dict[str, dict[str, dict[int, ReplayRow]]] = {}
    for row in rows:
        reference = by_request.get(row.request)
        place = f"Request {row.request} in order {row.order!r} of arm {row.arm!r}"
        if reference is None:
            raise BenchError(f"{place} has no full-prefill reference. Run the replay anew.")
        if row.prompt_digest != reference.prompt_digest:
            raise BenchError(
                f"{place} was another prompt ({row.prompt_digest}) than its reference "
                f"({reference.prompt_digest}). Delete the rows, and run the replay anew."
            )
        requests = arms.setdefault(row.arm, {}).setdefault(row.order, {})
        if row.request in requests:
            raise BenchError(f"{place} was measured twice. Delete the rows, and run the replay anew.")
        requests[row.request] = row
    for arm, orders in arms.items():
        if set(orders) <= set(CONTROLS):
            raise BenchError(
                f"Arm {arm!r} has rows of controls only ({', '.join(orders)}). Replay it in an order."
            )
    return Runs(references=dict(sorted(by_request.items())), arms=arms)


def is_faithful(row: ReplayRow, reference: ReferenceRow) -> bool:
    """Whether the answer is full prefill's, token by token."""
    return row.token_ids == reference.token_ids
