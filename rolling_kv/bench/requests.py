"""The requests of a run, and the window that holds one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from rolling_kv.config import DEFAULT_POLICY
from rolling_kv.errors import ConfigError
from rolling_kv.session import RollingSession
from rolling_kv.workloads import LABELLED, ROLLING, LabelledRequest, read_requests

if TYPE_CHECKING:
    from rolling_kv.engine.host import TransformersHost


def parse_documents(text: str) -> tuple[int, int]:
    """`24`, or a range such as `16-32`, as its ends.

    Raises:
        ConfigError
    """
    low, dash, high = text.partition("-")
    try:
        ends = int(low), int(high if dash else low)
    except ValueError:
        ends = (0, 0)
    if not 1 <= ends[0] <= ends[1]:
        raise ConfigError(f"documents is {text!r}; expected a number such as 24, or a range such as 16-32.")
    return ends


def requests_of(workload: str, *, seed: int, documents: tuple[int, int], count: int) -> list[LabelledRequest]:
    """The first `count` requests of a workload, or those of a JSONL file.

    Rolling workloads keep one number of documents, the larger; the others draw it anew for every request.

    Args:
        workload: a name in `LABELLED`, or the path of a file that ends with `.jsonl`.
    """
    if workload.endswith(".jsonl"):
        found = list(islice(read_requests(Path(workload)), count))
        if not found:
            raise ConfigError(f"{workload} holds no requests; expected one JSON object a line.")
        return found
    factory = LABELLED.create(workload)
    if documents[0] == documents[1] or workload in ROLLING:
        return list(islice(factory(seed, documents=documents[1]), count))
    rng = random.Random(f"documents:{seed}")
    sizes = [rng.randint(*documents) for _ in range(count)]
    streams: dict[int, Iterator[LabelledRequest]] = {}
    return [next(streams.setdefault(size, factory(seed, documents=size))) for size in sizes]


@contextmanager
def window_of(
    engine: TransformersHost, request: LabelledRequest, *, conditioning: str, anchors: bool
) -> Iterator[RollingSession]:
    """A session whose window holds the request's documents, with their KV, and anchors, at hand."""
    with RollingSession.open(
        model=engine,
        instruction=request.instruction,
        conditioning=conditioning,
        policy="qcfuse" if anchors else DEFAULT_POLICY,
        fresh_tail=0,
    ) as session:
        session.extend(request.documents)
        yield session
