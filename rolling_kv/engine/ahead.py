"""Work done ahead of its turn: on a thread beside the computation, and on a GPU on a stream of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Promise:
    """Two tensors that are being made; `done` is recorded behind them on their stream, on a GPU."""

    future: Future[Pair]
    done: torch.cuda.Event | None

    def get(self) -> Pair:
        """Waits for the tensors; on a GPU the current stream waits for them, and this thread does not.

        Raises:
            whatever making them raised.
        """
        made = self.future.result()
        if self.done is not None:
            stream = torch.cuda.current_stream(made[0].device)
            stream.wait_event(self.done)
            for tensor in made:  # its memory is not given away before this stream has done with it
                tensor.record_stream(stream)
        return made


class Ahead:
    """Makes pairs of tensors in the order in which they are asked for. One for each engine.

    Torch leaves Python's lock while it computes, so the thread runs beside the caller's where a core is free.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rolling_kv-ahead")
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types for it

    def make(self, work: Callable[[], Pair]) -> Promise:
        """Begins `work`, after what the current stream was given so far, beside what comes next."""
        if self._stream is None:
            return Promise(self._thread.submit(work), done=None)
        stream = self._stream
        given = torch.cuda.current_stream(self._device).record_event()
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types for it

        def on_stream() -> Pair:
            with torch.cuda.stream(stream):
                stream.wait_event(given)
                made = work()
                done.record(stream)
            return made

        return Promise(self._thread.submit(on_stream), done=done)
