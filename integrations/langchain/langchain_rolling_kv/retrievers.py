"""`RollingKVRetriever`: what of a session's window bears on a query."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import Field, SkipValidation

from rolling_kv import RollingSession

_K1, _B = 1.5, 0.75


class RollingKVRetriever(BaseRetriever):
    """Ranks the documents in the window of a `RollingSession` by BM25, without calling the model.

    Of equally good ones the newer comes first. A result's `id` is the document's; its metadata has the
    content hash, the position in the window and the score.

    Args:
        session: whose window, as it is when asked.
        k: documents at most.
    """

    session: SkipValidation[RollingSession] = Field(exclude=True, repr=False)
    k: int = Field(default=4, ge=1)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None, **kwargs: Any
    ) -> list[Document]:
        held = self.session.documents
        scores = bm25(query, [document.text for document in held])
        best = sorted(range(len(held)), key=lambda n: (scores[n], n), reverse=True)[: k or self.k]
        return [
            Document(
                id=held[n].id,
                page_content=held[n].text,
                metadata={"content_hash": held[n].content_hash, "position": n, "score": scores[n]},
            )
            for n in best
        ]


def bm25(query: str, texts: list[str]) -> list[float]:
    """The score of each text (Robertson and Zaragoza, 2009, equation 3.15, with k1 = 1.5 and b = 0.75).

    The weight of a word in n of N texts is log(1 + (N - n + 0.5) / (n + 0.5)), which is never negative.
    """
    counts = [Counter(_words(text)) for text in texts]
    lengths = [sum(count.values()) for count in counts]
    average = sum(lengths) / max(len(lengths), 1)
    scores = [0.0] * len(texts)
    for word in set(_words(query)):
        holding = sum(word in count for count in counts)
        weight = math.log(1 + (len(texts) - holding + 0.5) / (holding + 0.5))
        for n, count in enumerate(counts):
            if word in count:
                norm = _K1 * (1 - _B + _B * lengths[n] / average)
                scores[n] += weight * count[word] * (_K1 + 1) / (count[word] + norm)
    return scores


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())
