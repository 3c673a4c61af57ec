"""Streaming: an answer's text piece by piece, and its account at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import xxhash

from rolling_kv.answer import Answer, Timing, Trace, Usage
from rolling_kv.ingest import IngestReport
from rolling_kv.plan import Plan

if TYPE_CHECKING:
    from rolling_kv.call import Prefilled
    from rolling_kv.engine.decode import Decoding


class AnswerStream:
    """Iterate over it once for the pieces of text; `answer` is there when it has ended.

    Reading `answer` earlier decodes what is left first.
    """

    def __init__(
        self,
        decoding: Decoding,
        *,
        plan: Plan,
        prefilled: Prefilled,
        report: IngestReport,
        started: float,
        ready: float,
        clock: Callable[[], float],
    ) -> None:
        self._decoding = decoding
        self._pieces = self._run()
        self._plan = plan
        self._prefilled = prefilled
        self._report = report
        self._started = started
        self._ready = ready
        self._clock = clock
        self._answer: Answer | None = None

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def answer(self) -> Answer:
        for _ in self._pieces:
            pass
        assert self._answer is not None, "the answer is made when the pieces end"
        return self._answer

    def _run(self) -> Iterator[str]:
        yield from self._decoding
        self._answer = self._finished()

    def _finished(self) -> Answer:
        decoding, prefilled, report = self._decoding, self._prefilled, self._report
        return Answer(
            text=decoding.text,
            token_ids=tuple(decoding.token_ids),
            finish_reason=decoding.finish_reason,
            usage=Usage(
                prompt_tokens=len(self._plan.prompt),
                prefix=prefilled.prefix,
                reused=prefilled.reused,
                recomputed=len(prefilled.selected),
                computed=prefilled.computed,
                output=len(decoding.token_ids),
                ingested=report.computed,
                degraded=tuple(report.degraded),
            ),
            timing=Timing(
                ingest=report.seconds,
                load=prefilled.load,
                select=prefilled.select,
                fuse=prefilled.fuse,
                first_token=decoding.first_token_seconds,
                ttft=self._ready - self._started + decoding.first_token_seconds,
                total=self._clock() - self._started,
            ),
            trace=Trace(
                lineages=tuple(part.lineage.key for part in self._plan.stored),
                selected=prefilled.selected,
                selection=prefilled.stats,
                logits_fingerprint=xxhash.xxh3_128_hexdigest(prefilled.logits.cpu().numpy().tobytes()),
            ),
        )
