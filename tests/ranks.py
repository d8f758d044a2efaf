"""Ranks of a process group that are forked from the test, which has imported everything: a start
costs no imports.

Or threads of the test, where nothing but values is exchanged.
"""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import runs
import torch
import torch.distributed as dist
import warm

from fairseq.distributed import World


def on_ranks(function: Callable[..., Any], size: int, folder: Path, *arguments: Any) -> list[Any]:
    """Return what ``function(world, *arguments)`` returns on each of *size* processes, which talk
    over gloo.

    Args:
        function: its results are pickled.
        size: number of processes.
        folder: an empty one, for their rendezvous.
        arguments: inherited from this process.

    Raises:
        RuntimeError: the function failed on a process; the message is the first failure's. The
            others, which may wait for it, are killed.
    """
    warm.preload()
    context = multiprocessing.get_context("fork")
    ends = [context.Pipe(duplex=False) for _ in range(size)]
    sends = [send for _, send in ends]
    targets = [(function, World(rank, size), folder, sends, arguments) for rank in range(size)]
    processes = [context.Process(target=_run, args=target) for target in targets]
    for process in processes:
        process.start()
    for send in sends:
        send.close()  # so that the end of a process ends its pipe
    waiting = dict(enumerate(receive for receive, _ in ends))
    results: dict[int, Any] = {}
    try:
        while waiting:
            ready = wait(list(waiting.values()), runs.TIMEOUT)
            if not ready:
                raise RuntimeError(f"no answer of ranks {list(waiting)}")
            for rank in [rank for rank, receive in waiting.items() if receive in ready]:
                results[rank], failure = _answer(waiting.pop(rank), rank)
                if failure:
                    raise RuntimeError(failure)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [results[rank] for rank in range(size)]


def _answer(receive: Connection, rank: int) -> tuple[Any, str]:
    try:
        result, failure = pickle.loads(receive.recv_bytes())
        return result, failure
    except EOFError:
        return None, f"rank {rank}: ended without an answer"


def _run(function: Callable[..., Any], world: World, folder: Path, sends: list[Connection], arguments: Any) -> None:
    answer = sends.pop(world.rank)
    for other in sends:
        other.close()
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "meeting"), world.size)
    limit = timedelta(seconds=runs.TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=limit)
    try:
        result = function(world, *arguments), ""
    except Exception as error:
        result = None, f"rank {world.rank}: {type(error).__name__}: {error}"
    answer.send_bytes(pickle.dumps(result))  # tensors by value: their memory ends with the process
    dist.barrier()


@dataclass(frozen=True)
class ThreadWorld(World):
    """A rank that is a thread of this process."""

    meeting: Meeting | None = None

    def gather(self, value: Any, everywhere: bool = False) -> list[Any]:
        values = self._exchange_values(value)
        return values if everywhere or self.is_first else []

    def share(self, value: Any) -> Any:
        return self._exchange_values(value)[0]

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        return value.copy_(torch.stack(self._exchange_values(value.clone())).sum(0))

    def barrier(self) -> None:
        self._exchange_values(None)

    def _exchange_values(self, value: Any) -> list[Any]:
        assert self.meeting is not None
        return self.meeting.exchange(self.rank, value)


class Meeting:
    """The values that threads exchange, in rounds."""

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.sent: list[list[Any]] = [[] for _ in range(size)]
        self.ended: set[int] = set()

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Send *value* and return those of all threads in this round."""
        with self.changed:
            number = len(self.sent[rank])
            self.sent[rank].append(value)
            self.changed.notify_all()
            self.changed.wait_for(lambda: all(len(sent) > number for sent in self.sent) or self.ended, runs.TIMEOUT)
            assert all(len(sent) > number for sent in self.sent), "another rank has ended"
            return [sent[number] for sent in self.sent]

    def end(self, rank: int) -> None:
        """Tell that a thread sends nothing more."""
        with self.changed:
            self.ended.add(rank)
            self.changed.notify_all()


def in_threads(function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
    """Return what ``function(world, *arguments)`` returns, or the error it raises, on each of
    *size* threads.

    They exchange values, not tensors of PyTorch's process groups: much cheaper than
    :func:`on_ranks` where no such group is needed.
    """
    meeting = Meeting(size)

    def run(rank: int) -> Any:
        try:
            return function(ThreadWorld(rank, size, meeting=meeting), *arguments)
        except Exception as error:
            return error
        finally:
            meeting.end(rank)

    with ThreadPoolExecutor(size) as executor:
        return list(executor.map(run, range(size)))
