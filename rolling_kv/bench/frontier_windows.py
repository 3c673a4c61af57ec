"""The windows of a frontier run, one for each setting of how stored KV is made, which roll by a document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rolling_kv.bench.cells import Cell, Setting
from rolling_kv.bench.fidelity import Reference, measure
from rolling_kv.bench.layered import Layered
from rolling_kv.bench.work import Work
from rolling_kv.config import session_config
from rolling_kv.session import RollingSession
from rolling_kv.store import open_store
from rolling_kv.workloads import LabelledRequest

if TYPE_CHECKING:
    from rolling_kv.engine.host import TransformersHost
    from rolling_kv.store.base import KVStore

STREAM = 16  # documents before the first window, which stream:k has seen
_MEMORY = 2 << 30  # bytes of stored KV for each setting: left edges wait there until they are needed


def by_setting(cells: Sequence[Cell]) -> dict[Setting, list[Cell]]:
    grouped: dict[Setting, list[Cell]] = {}
    for cell in cells:
        grouped.setdefault(cell.setting, []).append(cell)
    return grouped


class Bases:
    """The KV of the window before the first request, made once for all settings that make it alike.

    The newest documents are left out, which some settings do not store.
    """

    def __init__(
        self, engine: TransformersHost, cells: Sequence[Cell], before: Sequence[LabelledRequest]
    ) -> None:
        self._engine = engine
        self._before = before
        self._anchored = {_alike(cell.setting) for cell in cells if cell.setting.anchors}
        self._fresh = max([1, *(cell.setting.fresh_tail for cell in cells)])
        self._stores: dict[Setting, KVStore] = {}

    def of(self, setting: Setting) -> KVStore:
        """A store that holds it; an empty one where a setting is exact and computes all it keeps."""
        if setting.exact:
            return open_store(None)
        alike = _alike(setting)
        if alike not in self._stores:
            made = replace(alike, anchors=alike in self._anchored)
            store = self._stores[alike] = open_store(None)
            with _session(self._engine, made, self._before, store=Layered(store, store)) as session:
                session.extend(_documents(made, self._before)[: -self._fresh])
        return self._stores[alike]


def _alike(setting: Setting) -> Setting:
    """What settings have in common whose KV is the same: fresh tail, anchors and idle time change none."""
    return replace(setting, fresh_tail=0, anchors=False, preroll="off")


def _documents(setting: Setting, before: Sequence[LabelledRequest]) -> list[str]:
    """Of the last request, behind those that left the window before it where the setting knows of them."""
    rolled = STREAM - 1 if setting.conditioning.startswith("stream") else 0
    if setting.batch:  # as far as it would be, had it begun with the first request
        rolled = (len(before) - STREAM) % setting.batch
    return [one.documents[0] for one in before[-1 - rolled : -1]] + list(before[-1].documents)


def _session(
    engine: TransformersHost, setting: Setting, before: Sequence[LabelledRequest], *, store: KVStore
) -> RollingSession:
    config = session_config(
        instruction=before[0].instruction,
        deterministic=False,
        **setting.session_settings(documents=len(before[0].documents)),
    )
    return RollingSession(engine=engine, store=store, config=config)


class RollingWindow:
    """The window of one setting, as it was before the next request.

    Args:
        cells: of the setting.
        before: the requests that came before the next one, at least `STREAM`.
        base: holds what is stored before the window rolls; it is not written to.
    """

    def __init__(
        self,
        engine: TransformersHost,
        work: Work,
        setting: Setting,
        cells: Sequence[Cell],
        before: Sequence[LabelledRequest],
        *,
        base: KVStore,
    ) -> None:
        self.setting = setting
        self.cells = cells
        self._work = work
        store = Layered(base, open_store(None, memory_limit=_MEMORY))
        self.session = _session(engine, setting, before, store=store)
        self.session.extend(_documents(setting, before))
        if not setting.batch:
            for document in self.session.documents[: -len(before[0].documents)]:
                self.session.evict(document.id)

    def __enter__(self) -> RollingWindow:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.session.close()

    def roll(self, text: str) -> dict[str, int]:
        """Rolls the window by one document; the multiplications that it took."""
        spent = {"idle": 0, "slide": 0}
        if self.setting.preroll != "off":
            spent["idle"] = self._work.during(self.session.preroll)
        elif not self.setting.batch:
            oldest = self.session.documents[0].id
            spent["slide"] = self._work.during(lambda: self.session.evict(oldest))
        spent["append"] = self._work.during(lambda: self.session.append(text))
        if self.setting.batch:  # the new document's pass is the last; the slide's came before it
            spent |= {"append": self._work.last, "slide": spent["append"] - self._work.last}
        return spent

    def outcomes(
        self, request: LabelledRequest, reference: Reference, *, turn: int
    ) -> dict[str, dict[str, Any]]:
        """What each cell makes of the request; the cells take turns at being first."""
        found = {}
        first = turn % len(self.cells)
        full = self._work.of(reference.prompt_tokens)
        scored = self._work.of(len(reference.token_ids), behind=reference.prompt_tokens)
        for cell in (*self.cells[first:], *self.cells[:first]):
            before = self._work.counted
            outcome = measure(self.session, request, reference, cell.arm, stats=False)
            counted = self._work.counted - before - scored
            found[cell.name] = asdict(cell.arm) | outcome.to_dict() | {"ask": counted / full}
        return {cell.name: found[cell.name] for cell in self.cells}
