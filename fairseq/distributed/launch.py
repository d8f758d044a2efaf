"""Start, join and end the processes of a job: local workers, torchrun's, SLURM's, or processes started by hand."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.queues import SimpleQueue
from typing import Any, Generic, NoReturn, TypeVar

import torch
import torch.distributed as dist

from fairseq.config.settings import CommonConfig, DistributedConfig
from fairseq.distributed import rendezvous
from fairseq.distributed.heartbeat import Heartbeat, publish_failure
from fairseq.distributed.interruption import EXIT_CODES
from fairseq.distributed.plan import Launch, plan
from fairseq.distributed.workers import USER_ERROR, Failure, Workers, end_with_launcher, leave
from fairseq.distributed.world import World, device_of
from fairseq.errors import UserError, is_out_of_memory, out_of_memory_message, with_flags
from fairseq.system.allocator import keep_freed_memory
from fairseq.system.plugins import import_user_module
from fairseq.system.terminal import closed_pipes, printable
from fairseq.system.waiting import short_waits_under_load

_QUICK = 2.0  # seconds to reach other nodes when this one ends


V = TypeVar("V")
R = TypeVar("R")


@dataclass(frozen=True)
class Job(Generic[V, R]):
    """A function that several processes run together: ``main(value, world)``.

    Pickle needs *main* to be a function of a module; a worker unpickles *value* after importing --user-dir.
    """

    main: Callable[[V, World], R]
    value: V
    common: CommonConfig
    distributed: DistributedConfig


def run(job: Job[V, R]) -> R | None:
    """Run *job* in as many processes as its settings and the environment ask for.

    Returns what ``job.main`` returned in this process; None if it started others.

    Under torchrun, under srun, or with --distributed-no-spawn this process is one of them; otherwise they are started
    here, one for each visible GPU or --distributed-world-size of them. A process that fails, or that does not respond
    for --distributed-timeout seconds, ends the others, and its message is the job's.

    Raises:
        UserError: CUDA is asked for and absent, the processes cannot meet, or one failed by a user's mistake.
        SystemExit: a process failed otherwise, or was interrupted by a signal.
    """
    cfg, cpu = job.distributed, job.common.cpu
    launch = plan(cfg, cpu, 0 if cpu else torch.cuda.device_count(), os.environ)
    _check_gpu(job.common, cfg, launch.size)
    if launch.count:
        _spawn(job, launch)
        return None
    device = device_of(job.common, launch.local_rank)
    if launch.size == 1:
        return job.main(job.value, World(0, 1, device))
    assert launch.url is not None
    server = None
    url = launch.url
    if rendezvous.hosts_store(url, launch.first):
        server, url = rendezvous.listen(url, cfg.distributed_timeout)
    world = World(launch.first, launch.size, device, cfg.distributed_timeout)
    result = _join(job, world, url, functools.partial(_fail_alone, launch.size))
    # Only now: the heartbeats of the other processes went through it.
    del server
    return result


def _check_gpu(common: CommonConfig, cfg: DistributedConfig, size: int) -> None:
    """Refuse settings that need a GPU where there is none, in a job of *size* processes."""
    if common.cpu or not torch.cuda.is_available():
        # Commands written for fairseq name it on every machine; a single process talks to nobody.
        if cfg.distributed_backend == "nccl" and size > 1:
            raise UserError("`distributed_backend` nccl: needs a GPU, and there is none; use gloo")
        if not common.cpu and cfg.local_rank > 0 and "RANK" not in os.environ:
            raise UserError(f"`device_id` {cfg.local_rank}: there is no GPU; add `cpu` to run on the processor")


Fail = Callable[[Failure], NoReturn]


def _join(job: Job[V, R], world: World, url: str, fail: Fail) -> R:
    """Run *job* as one process of *world*, in touch with the others from beginning to end."""
    cfg = job.distributed
    # Imported later, it would hold on to the group.
    importlib.import_module("torch.distributed.nn.functional")
    rank, size, timeout = world.rank, world.size, cfg.distributed_timeout
    rendezvous.stay_on_loopback(url)
    store = rendezvous.connect(url, rank, size, timeout)
    # A second connection: the thread must not wait behind a request of this one.
    heartbeat = Heartbeat(rendezvous.connect(url, rank, size, timeout), rank, size, timeout, fail)
    # Before the heartbeat starts: a slow import must not look like a process that stopped.
    rendezvous.meet(store, rank, size, timeout)
    heartbeat.start()
    stopped = None
    try:
        backend = cfg.distributed_backend or ("nccl" if world.device.type == "cuda" else "gloo")
        limit = timedelta(seconds=timeout)
        dist.init_process_group(
            backend, store=dist.PrefixStore("group", store), rank=rank, world_size=size, timeout=limit
        )
        result = job.main(job.value, world)
        # A process that ends early must not look like one that stopped.
        world.barrier()
    except SystemExit as end:
        if end.code not in EXIT_CODES:
            heartbeat.stop()
            raise
        # By a signal: all processes stop after the same update.
        stopped = end.code
    except BaseException as error:
        cause = heartbeat.explain(error)
        if cause is None:
            heartbeat.report(_failure(rank, error))
            raise
        if cause.code == USER_ERROR:
            raise UserError(cause.reason) from None
        fail(cause)
    heartbeat.stop()
    # What still refers to the group keeps its threads alive, which abort a process as it ends.
    gc.collect()
    dist.destroy_process_group()
    if stopped is not None:
        sys.exit(stopped)
    return result


def _spawn(job: Job[V, R], launch: Launch) -> None:
    url = launch.url
    if launch.first == 0 and (url is None or rendezvous.hosts_store(url, 0)):
        # The launcher has the store, not rank 0: it outlives every process that may fail.
        server, url = rendezvous.listen(url, job.distributed.distributed_timeout)
    assert url is not None
    # Otherwise each process would start a thread for every core.
    if "OMP_NUM_THREADS" not in os.environ and job.common.cpu:
        os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // launch.count))
    arguments = (job.common.user_dir, pickle.dumps(job), launch.size, url)
    with Workers(_worker, launch.first, launch.count, arguments) as workers:
        failure = workers.wait()
    if failure is None:
        return
    # The launchers of other machines do not see these processes.
    if launch.count < launch.size:
        _tell_other_nodes(url, launch, failure)
    if failure.code == USER_ERROR:
        raise UserError(failure.reason)
    if failure.reason:
        _report(failure, launch.size)
    sys.exit(failure.code)


def _tell_other_nodes(url: str, launch: Launch, failure: Failure) -> None:
    if failure.code in EXIT_CODES:  # they stop at the same update
        return
    # The first node is what failed: torch would try for minutes.
    if not rendezvous.is_reachable(url, _QUICK):
        return

    def publish() -> None:
        with contextlib.suppress(UserError, RuntimeError):
            store = rendezvous.connect(url, launch.first, launch.size, _QUICK)
            publish_failure(store, failure)

    # In a thread that the end of this process ends: torch waits without limit for a store that is stopped.
    thread = threading.Thread(target=publish, name="publish", daemon=True)
    thread.start()
    thread.join(_QUICK)


def _worker(
    messages: SimpleQueue[Failure],
    rank: int,
    local_rank: int,
    user_dir: str | None,
    pickled: bytes,
    size: int,
    url: str,
) -> None:
    """One process that the launcher started."""
    keep_freed_memory()
    end_with_launcher()
    try:
        if user_dir:
            import_user_module(user_dir)
        # Pickled by the launcher itself, never read from a file; plug-ins that it names are imported first.
        job: Job[Any, Any] = pickle.loads(pickled)
        world = World(rank, size, device_of(job.common, local_rank), job.distributed.distributed_timeout)
        end = Failure(rank, 128 + signal.SIGPIPE, "")
        with short_waits_under_load(), closed_pipes(functools.partial(leave, messages, end)):
            _join(job, world, url, functools.partial(leave, messages))
    except Exception as error:
        failure = _failure(rank, error)
        leave(messages, failure if failure.code == USER_ERROR else Failure(rank, 1, traceback.format_exc()))


def _fail_alone(size: int, failure: Failure) -> NoReturn:
    """End a process that has no launcher of ours: its message goes to stderr."""
    _report(failure, size)
    os._exit(failure.code)


def _failure(rank: int, error: BaseException) -> Failure:
    """The failure of the process of *rank* with *error*: exit code 2 for a mistake of the user, else 1."""
    if isinstance(error, UserError):
        return Failure(rank, USER_ERROR, error.args[0])
    if is_out_of_memory(error):
        return Failure(rank, USER_ERROR, out_of_memory_message(error))
    return Failure(rank, 1, f"{type(error).__name__}: {error}")


def _report(failure: Failure, size: int) -> None:
    # A mistake of the user is one line, as it is where it was found.
    separator = " " if failure.code == USER_ERROR else "\n"
    message = f"process {failure.rank} of {size} failed:{separator}{printable(with_flags(failure.reason))}"
    print(message, file=sys.stderr, flush=True)
