"""Streaming: an answer's text piece by piece, and its account at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from rolling_kv.account import Account
from rolling_kv.answer import Answer
from rolling_kv.errors import AnswerUnfinishedError

if TYPE_CHECKING:
    from rolling_kv.engine.decode import Decoding


class AnswerStream:
    """Iterate over it once for the pieces of text; `answer` is there when it has ended.

    Reading `answer` earlier decodes what is left first.

    Args:
        busy: entered while the answer is decoded.
        answered: called with the answer before anybody sees it.
    """

    def __init__(
        self,
        decoding: Decoding,
        *,
        account: Account,
        busy: Callable[[], AbstractContextManager[None]],
        answered: Callable[[Answer], None],
    ) -> None:
        self._decoding = decoding
        self._ended: list[Answer] = []
        # It knows nothing of this object, so that a stream that is dropped half-read ends at once.
        self._pieces = _pieces(decoding, account, busy=busy, answered=answered, ended=self._ended)

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def __next__(self) -> str:
        return next(self._pieces)

    @property
    def answer(self) -> Answer:
        """The whole answer.

        Raises:
            AnswerUnfinishedError: decoding failed, or the stream was closed, before its end.
        """
        for _ in self._pieces:
            pass
        if not self._ended:
            raise AnswerUnfinishedError(
                f"The answer ended early, after {len(self._decoding.token_ids)} tokens, because decoding "
                "failed or its stream was closed. Ask again; the window is as it was."
            )
        return self._ended[0]


def _pieces(
    decoding: Decoding,
    account: Account,
    *,
    busy: Callable[[], AbstractContextManager[None]],
    answered: Callable[[Answer], None],
    ended: list[Answer],
) -> Iterator[str]:
    """The pieces of text; behind the last one the answer is put into `ended`."""
    with busy():
        yield from decoding
    answer = Answer(
        text=decoding.text,
        token_ids=tuple(decoding.token_ids),
        finish_reason=decoding.finish_reason,
        usage=account.usage(output=len(decoding.token_ids)),
        timing=account.timing(first_token=decoding.first_token_seconds),
        trace=account.trace(margins=decoding.margins),
    )
    answered(answer)
    ended.append(answer)
