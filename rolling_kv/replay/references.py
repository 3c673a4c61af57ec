"""What every arm is compared with: full prefill's answers, computed once, with their logits on the disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rolling_kv.bench.arms import Arm
from rolling_kv.bench.fidelity import Reference
from rolling_kv.replay.history import History, HistoryRequest
from rolling_kv.replay.playback import Playback, Played
from rolling_kv.replay.rows import ReferenceRow
from rolling_kv.replay.trace.lines import tokens_digest
from rolling_kv.workloads import holds_whole

FULL_PREFILL = Arm(policy="full-prefill")


class References:
    """Full prefill's answers to the requests of a history.

    Args:
        folder: of their logits, one file a request. What is missing there is answered again.
        known: the answers that there are.
    """

    def __init__(self, history: History, *, folder: Path, known: Sequence[ReferenceRow]) -> None:
        self._history = history
        self._folder = folder
        self._known = {row.request: row for row in known}

    def missing(self, numbers: Sequence[int]) -> list[int]:
        """Of these requests, those that are not answered yet."""
        return [n for n in numbers if n not in self._known or not self._path(n).exists()]

    def row(self, number: int) -> ReferenceRow:
        return self._known[number]

    def keep(self, row: ReferenceRow) -> bool:
        """Whether this answer was not known; it is now."""
        new = row.request not in self._known
        self._known.setdefault(row.request, row)
        return new

    def answer(self, number: int, playback: Playback) -> ReferenceRow:
        """Answers a request by full prefill; its logits are on the disk when this returns."""
        from safetensors.torch import save_file

        request = self._history.requests[number]
        played = playback.play(request)
        path = self._path(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".part")
        save_file({"logits": played.logits.float().cpu().contiguous()}, temporary)
        with temporary.open("rb") as file:  # before the row that says it is there
            os.fsync(file.fileno())
        os.replace(temporary, path)
        return _row(request, played)

    def __getitem__(self, number: int) -> Reference:
        """The answer with its logits, read from the disk."""
        from safetensors.torch import load_file

        row = self._known[number]
        logits = load_file(self._path(number))["logits"]
        return Reference(
            token_ids=row.token_ids,
            ended=len(logits) > len(row.token_ids),
            logits=logits,
            text=row.text,
            right=row.right,
            ttft=row.ttft,
            prompt_tokens=row.prompt_tokens,
        )

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06d}.safetensors"


def _row(request: HistoryRequest, played: Played) -> ReferenceRow:
    answer = played.answer
    query = request.question.query
    return ReferenceRow(
        request=request.number,
        prompt_digest=tokens_digest(played.prompt.token_ids),
        prompt_tokens=len(played.prompt),
        segments=tuple(segment.name for segment in played.prompt.segments),
        query=query if isinstance(query, str) else str(query.get("content") or ""),
        token_ids=answer.token_ids,
        text=answer.text,
        margins=answer.trace.margins,
        right=holds_whole(answer.text, request.expected) if request.expected else None,
        ttft=answer.timing.ttft,
    )
