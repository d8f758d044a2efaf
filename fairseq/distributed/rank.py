"""One rank of a job: it joins the others by torch's variables, and tells why it fails."""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from fairseq.config.settings import CommonConfig, DistributedConfig
from fairseq.distributed.interruption import EXIT_CODES
from fairseq.distributed.world import World, device_of
from fairseq.errors import UserError, is_out_of_memory, out_of_memory_message, with_flags
from fairseq.system.allocator import keep_freed_memory
from fairseq.system.plugins import import_user_module
from fairseq.system.terminal import closed_pipes
from fairseq.system.waiting import short_waits_under_load
from fairseq.system.workers import watch_parent

LOOPBACK = "127.0.0.1"
USER_ERROR = 2  # exit code
SLOWEST_START = 300.0  # seconds; importing torch from a network file system may take minutes
WHERE_IT_HANGS = (
    "another rank hangs or is stopped; to see where, run `py-spy dump -p PID` on each rank while the job hangs, or "
    "set TORCH_FR_BUFFER_SIZE=2000 for NCCL's flight recorder"
)
_CAUSE_FIRST = 10.0  # seconds that a rank which lost another gives it to end first

V = TypeVar("V")
R = TypeVar("R")


@dataclass(frozen=True)
class Job(Generic[V, R]):
    """A function of a module that several processes run together: ``main(value, world)``.

    A rank unpickles *value* after importing --user-dir.
    """

    main: Callable[[V, World], R]
    value: V
    common: CommonConfig
    distributed: DistributedConfig


def is_set() -> bool:
    """Return whether the environment names the rank of this process."""
    # torchrun sets both; one alone may be left over from something else.
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def number(name: str, default: int = 0) -> int:
    """Return the whole number in an environment variable; raise UserError for any other text."""
    if not (text := os.environ.get(name, str(default))).isdecimal():
        raise UserError(f"{name}={text}: the variable must be a whole number")
    return int(text)


def start(arguments: tuple[str | None, bytes]) -> int:
    """Run --user-dir and a pickled job as a rank of torch's agent; return the job's exit code."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    user_dir, pickled = arguments
    keep_freed_memory()
    watch_parent()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # torch takes a KeyboardInterrupt for success, and the agent would wait for a result.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        if user_dir:
            import_user_module(user_dir)
        # Pickled by the agent's process, never read from a file.
        job: Job[Any, Any] = pickle.loads(pickled)
        with short_waits_under_load(), closed_pipes(lambda: os._exit(128 + signal.SIGPIPE)):
            join(job)
    except SystemExit as end:
        if end.code not in EXIT_CODES:
            raise
        return int(end.code or 0)
    except Exception as error:
        mistake = _mistake(error)
        get_error_handler().record_exception(mistake or error)
        if number("TORCHELASTIC_RESTART_COUNT") < number("TORCHELASTIC_MAX_RESTARTS"):
            traceback.print_exc()
            sys.stderr.flush()
        # Not sys.exit: threads of a collective may wait for processes that are gone.
        os._exit(USER_ERROR if mistake else 1)
    return 0


def _mistake(error: Exception) -> UserError | None:
    """The message of a user's mistake, with flags; None for other errors."""
    if isinstance(error, UserError):
        return UserError(error.with_flags)
    return UserError(with_flags(out_of_memory_message(error))) if is_out_of_memory(error) else None


def join(job: Job[V, R]) -> R:
    """Run *job* as the rank of torch's variables: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, …"""
    cfg, rank, size = job.distributed, number("RANK"), number("WORLD_SIZE")
    if rank >= size:
        raise UserError(f"RANK={rank}: ranks of WORLD_SIZE={size} are numbered from 0")
    world = World(rank, size, device_of(job.common, number("LOCAL_RANK", rank)), cfg.distributed_timeout)
    if size == 1:
        return job.main(job.value, world)
    # Imported later, it would hold on to the group.
    importlib.import_module("torch.distributed.nn.functional")
    backend = cfg.distributed_backend or ("nccl" if world.device.type == "cuda" else "gloo")
    limit, stopped = timedelta(seconds=cfg.distributed_timeout), None
    try:
        store = _connect(rank, size, cfg.distributed_timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
        result = job.main(job.value, world)
        # A process that ends early must not look like one that failed.
        world.barrier()
    except SystemExit as end:
        if end.code not in EXIT_CODES:
            raise
        # By a signal: all ranks stop after the same update.
        stopped = end
    except RuntimeError as error:
        text = str(error).lower()
        if "timed out" in text or "timeout" in text:
            seconds = f"{cfg.distributed_timeout:g} s (`distributed_timeout`)"
            raise RuntimeError(f"a collective did not end in {seconds}: {WHERE_IT_HANGS}") from error
        is_lost = any(words in text for words in ("connection closed", "connection reset", "gloo", "nccl"))
        if is_lost and "TORCHELASTIC_RUN_ID" in os.environ:
            # The agent ends this rank too, and names the first that ended.
            time.sleep(_CAUSE_FIRST)
        raise
    # What still refers to the group keeps its threads alive, which abort a process as it ends.
    gc.collect()
    dist.destroy_process_group()
    if stopped is not None:
        raise stopped
    return result


def _connect(rank: int, size: int, timeout: float) -> dist.Store:
    """Return the store of the job, once all ranks have connected to it.

    Raises:
        UserError: a rank does not connect within *timeout* or ``SLOWEST_START`` seconds.
    """
    from torch.distributed.elastic.utils.store import barrier

    patience = max(timeout, SLOWEST_START)
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    on_loopback = os.environ.get("MASTER_ADDR") in (LOOPBACK, "localhost")
    if on_loopback:
        # gloo would listen at the address of the host's name, which other machines may reach.
        interface = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    try:
        server = listen(number("MASTER_PORT")) if on_loopback and rank == 0 and not has_agent else None
        store, _, _ = next(iter(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=patience))))
        del server
        if has_agent and os.environ.get("GROUP_WORLD_SIZE") == "1":
            # One store serves all starts, which must not read what those before left. Several nodes
            # count starts each for itself.
            store = dist.PrefixStore(f"attempt {number('TORCHELASTIC_RESTART_COUNT')}", store)
        barrier(store, size, "start", patience, rank, str, trace_timeout=1)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"MASTER_ADDR and MASTER_PORT: {str(error).splitlines()[0]}") from None
    store.set_timeout(timedelta(seconds=timeout))
    return store


def listen(port: int) -> dist.TCPStore:
    """Open the store of a job at *port* of the loopback (0: a free one); UserError if it cannot be.

    Torch's own would listen on every interface.
    """
    with socket.socket() as bound:
        try:
            # A run may follow another at once, whose connections the kernel has not forgotten.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((LOOPBACK, port))
            bound.listen(1024)
        except OSError as error:
            raise UserError(f"`distributed_port` {port}: cannot be opened ({error.strerror}); use another") from None
        port = bound.getsockname()[1]
        # Whatever opens the store of this port in this process gets this one.
        return dist.TCPStore(LOOPBACK, port, is_master=True, multi_tenant=True, master_listen_fd=bound.detach())
