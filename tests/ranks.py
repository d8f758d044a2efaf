"""Ranks of a process group that are forked from the test, which has imported everything: a start costs no imports."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import runs
import torch
import torch.distributed as dist

from fairseq.distributed import World

NONE = pickle.dumps((None, "no answer"))


def on_ranks(function: Callable[..., Any], size: int, folder: Path, *arguments: Any) -> list[Any]:
    """Return what ``function(world, *arguments)`` returns on each of *size* processes, which talk over gloo.

    Args:
        function: its results are pickled.
        size: number of processes.
        folder: an empty one, for their rendezvous.
        arguments: inherited from this process.

    Raises:
        RuntimeError: the function failed on a process; the message is the first failure's.
    """
    context = multiprocessing.get_context("fork")
    ends = [context.Pipe(duplex=False) for _ in range(size)]
    targets = [(function, World(rank, size), folder, ends[rank][1], arguments) for rank in range(size)]
    processes = [context.Process(target=_run, args=target) for target in targets]
    for process in processes:
        process.start()
    try:
        answers = [receive.recv_bytes() if receive.poll(runs.TIMEOUT) else NONE for receive, _ in ends]
    finally:
        for process in processes:
            process.kill()
            process.join()
    results = [pickle.loads(content) for content in answers]
    if failures := [failure for _, failure in results if failure]:
        raise RuntimeError(failures[0])
    return [result for result, _ in results]


def _run(function: Callable[..., Any], world: World, folder: Path, answer: Connection, arguments: Any) -> None:
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
