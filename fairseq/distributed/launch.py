"""Run a job on its processes: ranks of torch's elastic agent, or this one for torchrun or srun."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

from fairseq.config.settings import DistributedConfig
from fairseq.distributed import rank, slurm
from fairseq.distributed.interruption import EXIT_CODES, SIGNALS
from fairseq.distributed.rank import Job, R, V
from fairseq.distributed.world import World, device_of
from fairseq.errors import SettingError, UserError, with_flags
from fairseq.modules import devices
from fairseq.system.limits import check_processes
from fairseq.system.terminal import printable


def run(job: Job[V, R]) -> R | None:
    """Run *job* in as many processes as its settings and the environment ask for.

    Under torchrun or srun this process is one of them; otherwise torch's elastic agent starts them.
    A rank that fails ends the others, and its message is the job's.

    Returns:
        What ``job.main`` returned in this process; None if it started others.

    Raises:
        UserError: a GPU is asked for and absent, the processes cannot connect, or a user's mistake.
        SystemExit: a process failed otherwise, or was interrupted by a signal.
    """
    cfg, cpu = job.distributed, job.common.cpu
    gpus = 0 if cpu else devices.count()
    task = None if rank.is_set() else slurm.task_of(cfg, gpus, os.environ)
    if task is not None and not task.processes:
        os.environ.update(task.variables)
    if rank.is_set():
        size = rank.number("WORLD_SIZE")
    else:
        size = _processes(cfg, cpu, gpus) if task is None else task.count * task.processes
    # Commands written for fairseq name it on every machine; a single process talks to nobody.
    if cfg.distributed_backend == "nccl" and size > 1 and not gpus:
        raise UserError("`distributed_backend` nccl: needs a GPU, and there is none; use gloo")
    if rank.is_set():
        if cfg.max_restarts:
            raise SettingError("`max_restarts`: another program started this process; give torchrun the flag")
        from torch.distributed.elastic.multiprocessing.errors import record

        # For torchrun, whose last message is then the error of the first rank that failed.
        return record(rank.join)(job)
    if size == 1 and not cfg.max_restarts:
        if cfg.local_rank and not (cpu or gpus):
            raise UserError(f"`device_id` {cfg.local_rank}: there is no GPU; add `cpu` to run on the processor")
        return job.main(job.value, World(0, 1, device_of(job.common, cfg.local_rank)))
    _launch(job, size, task)
    return None


def _processes(cfg: DistributedConfig, cpu: bool, gpus: int) -> int:
    """The number of processes of a job on one machine."""
    flag = "`nprocs_per_node`" if cfg.nprocs_per_node else "`distributed_world_size`"
    count = cfg.distributed_world_size or cfg.nprocs_per_node or max(gpus, 1)
    if count > (cfg.nprocs_per_node or count):
        raise SettingError(
            f"`distributed_world_size` {count}: more than {flag}; start several nodes by torchrun or srun"
        )
    if count > 1 and cpu:
        # The number of GPUs bounds nothing here, and each process takes memory.
        check_processes(flag, count)
    elif count > max(gpus, 1):
        raise UserError(f"{flag} {count}: this machine has {gpus} GPUs; add `cpu` to run on the processor")
    return count


def _launch(job: Job[V, R], size: int, task: slurm.Task | None) -> None:
    """Start the ranks of this machine, or of SLURM's node, and wait for them."""
    # Imported here: a run of one process needs none of it.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    cfg, nodes = job.distributed, 1 if task is None else task.count
    # Otherwise each process would start a thread for every core.
    if "OMP_NUM_THREADS" not in os.environ and job.common.cpu:
        os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) * nodes // size))
    # The failure that ends the job is reported below, those before restarts by torch.
    handler = logging.StreamHandler() if cfg.max_restarts else logging.NullHandler()
    handler.setLevel(logging.ERROR)
    for logger in map(logging.getLogger, ("torch.distributed.elastic", "torch.multiprocessing")):
        logger.handlers, logger.propagate = [handler], False
    rendezvous: dict[str, Any]
    if task is None:
        store = rank.listen(max(cfg.distributed_port, 0))
        rendezvous = {"rdzv_backend": "static", "rdzv_endpoint": f"{rank.LOOPBACK}:{store.port}"}
        rendezvous["rdzv_configs"] = {"rank": 0}
    else:
        # Nodes count restarts each for itself, and cannot name them: every start has its own store.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        patience = int(max(cfg.distributed_timeout, rank.SLOWEST_START))
        rendezvous = {"rdzv_backend": "c10d", "rdzv_endpoint": f"{task.host}:{task.port}"}
        rendezvous["rdzv_configs"] = {"is_host": task.rank == 0, "join_timeout": patience, "read_timeout": patience}
        rendezvous["local_addr"] = os.environ.get("SLURMD_NODENAME")
    with tempfile.TemporaryDirectory() as folder, _signals_passed_on():
        logs = DefaultLogsSpecs(folder)
        config = LaunchConfig(nodes, nodes, size // nodes, logs, "job", max_restarts=cfg.max_restarts, **rendezvous)
        # With handlers of its own, the agent would kill ranks that take over 30 seconds to save.
        config.signals_to_handle = "SIGQUIT"
        try:
            codes = elastic_launch(config, rank.start)((job.common.user_dir, pickle.dumps(job)))
        except ChildFailedError as error:
            number, failure = error.get_first_failure()
            _report(number, size, failure.exitcode, failure.message)
        except RendezvousError as error:
            raise UserError(f"{config.rdzv_endpoint}: the nodes cannot connect ({error})") from None
    if code := max(code or 0 for code in codes.values()):
        sys.exit(code)


@contextlib.contextmanager
def _signals_passed_on() -> Iterator[None]:
    """Pass a signal on to the ranks, which decide what to do; a second one kills them and ends this
    process.

    Ranks inherit the mask of the main thread: a signal waits until they can handle it. Those of
    this process reach its other threads, and its handlers would run too late for the update.
    """
    handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    received: list[int] = []

    def pass_on() -> None:
        while number := receiver.recv(1):
            for process in multiprocessing.active_children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid or 0, number[0])

    def end_at_second(number: int, frame: FrameType | None) -> None:
        received.append(number)
        ranks = multiprocessing.active_children()
        if len(received) > 1 or not ranks:
            for process in ranks:
                process.kill()
            sys.exit(128 + number)

    thread = threading.Thread(target=pass_on, name="signals", daemon=True)
    thread.start()
    before = {number: signal.signal(number, end_at_second) for number in handled}
    previous = signal.set_wakeup_fd(sender.fileno())
    signal.pthread_sigmask(signal.SIG_BLOCK, handled)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
        signal.set_wakeup_fd(previous)
        for number, handler in before.items():
            signal.signal(number, handler)
        sender.close()
        thread.join()
        receiver.close()


def _report(number: int, size: int, code: int, message: object) -> NoReturn:
    """End as rank *number* did, with its exit code and the agent's message."""
    if code in EXIT_CODES:
        sys.exit(code)
    if code == rank.USER_ERROR and isinstance(message, dict):
        raise UserError(message["message"].partition(": ")[2])
    if isinstance(message, dict):
        reason = message["extraInfo"]["py_callstack"].rstrip()
    elif code >= 0:
        reason = f"exited with code {code}"
    else:
        reason = f"killed by signal {-code} ({signal.Signals(-code).name})"
        # NCCL's watchdog ends a process whose collective takes too long.
        reason += f"; if a collective timed out: {rank.WHERE_IT_HANGS}" if code == -signal.SIGABRT else ""
    print(f"process {number} of {size} failed:\n{printable(with_flags(reason))}", file=sys.stderr, flush=True)
    sys.exit(1)
