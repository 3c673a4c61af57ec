"""Processes that play the parts of a replay beside each other, each with an engine of its own."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rolling_kv.errors import BenchError, ConfigError
from rolling_kv.replay.player import Part, Player, Row

if TYPE_CHECKING:
    from rolling_kv.engine.host import TransformersHost
    from rolling_kv.kv import ModelIdentity
    from rolling_kv.replay.history import History
    from rolling_kv.replay.playback import Protocol

_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Workers:
    """How many processes play, and how.

    Args:
        count: of processes.
        threads: of torch in each.
        open_engine: called in each process; a function that can be pickled.
    """

    count: int
    threads: int
    open_engine: Callable[[], TransformersHost]


def share_out(engine: TransformersHost, *, asked: int | None, passes: int) -> tuple[int, int]:
    """How many processes, and how many threads in each: together the threads that torch has now.

    Small models leave threads idle within one pass, so processes go first. There are no more of them than
    passes, and not more than the free memory holds at three times the model's size each; on a GPU one.

    Args:
        asked: this many processes; None for as many as are good.

    Raises:
        ConfigError: `asked` is not at least 1, or is more than 1 on a GPU.
    """
    import torch

    threads = torch.get_num_threads()
    on_cpu = engine.device.type == "cpu"
    if asked is not None:
        if asked < 1:
            raise ConfigError(f"--workers is {asked}; expected at least 1.")
        if asked > 1 and not on_cpu:
            raise ConfigError(
                f"--workers is {asked} on {engine.device}; expected 1: a GPU is shared by none."
            )
        return min(asked, passes), max(1, threads // min(asked, passes))
    room = _free_bytes() // (3 * engine.weight_bytes)
    count = max(1, min(threads, passes, room)) if on_cpu else 1
    return count, max(1, threads // count)


class Crew:
    """Workers, started when there is something to play. Use it as a context manager, which stops them at its
    end, whatever they do.

    Raises:
        BenchError: a worker died, or opened another model than `identity`. Whatever else a worker raises.
    """

    def __init__(
        self,
        workers: Workers,
        history: History,
        *,
        identity: ModelIdentity,
        protocol: Protocol,
        folder: Path,
    ) -> None:
        self._context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
        self._workers = workers
        self._given = (workers, history, identity, protocol, folder)
        self._processes: list[SpawnProcess] = []
        self._idle: list[Connection] = []
        self._busy: dict[Connection, Part] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in (*self._idle, *self._busy):
            connection.close()
        for process in self._processes:
            process.terminate()
            process.join()

    def play(self, parts: Iterable[Part]) -> Iterator[tuple[Part, Row | None]]:
        """The rows of all parts, as they come."""
        waiting = deque(parts)
        while waiting or self._busy:
            while waiting and (self._idle or len(self._processes) < self._workers.count):
                connection = self._idle.pop(0) if self._idle else self._started()
                part = self._busy[connection] = waiting.popleft()
                try:
                    connection.send(part)
                except BrokenPipeError as error:
                    raise _died() from error
            ready = wait(list(self._busy))
            for connection in [one for one in self._busy if one in ready]:
                try:
                    message = connection.recv()
                except (EOFError, ConnectionResetError) as error:
                    raise _died() from error
                if isinstance(message, BaseException):
                    raise message
                if isinstance(message, _Done):
                    self._busy.pop(connection)
                    self._idle.append(connection)
                else:
                    yield self._busy[connection], message

    def _started(self) -> Connection:
        """The pipe to one more worker."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_work, args=(theirs, *self._given), name="rolling-kv-replay", daemon=True
        )
        process.start()
        theirs.close()  # so that a worker's death is the end of the pipe
        self._processes.append(process)
        return ours


class _Done:
    """A worker's message: the part is played."""


def _work(
    connection: Connection,
    workers: Workers,
    history: History,
    identity: ModelIdentity,
    protocol: Protocol,
    folder: Path,
) -> None:
    """A worker: plays parts until the pipe ends."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it reaches all processes, and the first ends the others
    torch.set_num_threads(workers.threads)
    try:
        player = Player(_opened(workers, identity), history, protocol=protocol, folder=folder)
        while True:
            for row in player.play(connection.recv()):
                connection.send(row)
            connection.send(_Done())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # whoever started this is gone
    except Exception as error:
        connection.send(_portable(error))


def _opened(workers: Workers, identity: ModelIdentity) -> TransformersHost:
    engine = workers.open_engine()
    if engine.identity != identity:
        raise BenchError(
            f"The model {identity.name!r} was another one when a worker opened it. Leave its files alone "
            "while a replay runs, or give --workers 1."
        )
    return engine


def _portable(error: Exception) -> Exception:
    """`error` where it can be sent, else its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return BenchError(f"{type(error).__name__}: {error}")
    return error


def _died() -> BenchError:
    return BenchError(
        "A worker process ended before its work, perhaps for want of memory. What was answered is kept where "
        "there is an --out; go on with fewer --workers. (A script that uses workers has to guard what it "
        "runs with if __name__ == '__main__'.)"
    )


def _free_bytes() -> int:
    """Memory that is free or can be freed; where the system does not say, enough for one worker."""
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    kilobytes = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), "0")
    return int(kilobytes) * 1024
