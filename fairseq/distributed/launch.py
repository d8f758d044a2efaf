"""Run a job on its processes: ranks of torchrun or srun, or of torch's elastic agent, started here.

Every rank connects by torch's own variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
MASTER_PORT).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import logging
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, Generic, NoReturn, TypeVar

import torch.distributed as dist

from fairseq.config.settings import CommonConfig, DistributedConfig
from fairseq.distributed.interruption import EXIT_CODES, SIGNALS, end_at_signals
from fairseq.distributed.world import World, device_of
from fairseq.errors import SettingError, UserError, is_out_of_memory, out_of_memory_message, with_flags
from fairseq.modules import devices
from fairseq.system.allocator import keep_freed_memory
from fairseq.system.limits import check_processes
from fairseq.system.plugins import import_user_module
from fairseq.system.terminal import log_to_stderr, printable
from fairseq.system.workers import watch_parent

USER_ERROR = 2  # exit code
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


def run(job: Job[V, R]) -> R | None:
    """Run *job* in as many processes as its settings and the environment ask for.

    Returns:
        What ``job.main`` returned in this process; None if it started others.

    Raises:
        UserError: a GPU is asked for and absent, the processes cannot connect, or a user's mistake.
        SystemExit: a process failed otherwise, or was interrupted by a signal.
    """
    cfg, cpu = job.distributed, job.common.cpu
    gpus = 0 if cpu else devices.count()
    # torchrun sets both; one alone may be left over from something else.
    is_rank = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    step = None if is_rank or cfg.distributed_world_size == 1 else step_of(os.environ)
    if step is not None and step.tasks != step.nodes:  # several tasks on a node: each is a rank
        os.environ.update(step.variables(gpus, cfg.distributed_port))
        is_rank = True
    size = _number("WORLD_SIZE") if is_rank else _processes(cfg, cpu, gpus, step)
    if step is not None and cfg.distributed_world_size not in (None, size):
        raise SettingError(
            f"`distributed_world_size` {cfg.distributed_world_size}: srun started {step.tasks} tasks, which make "
            f"{size} processes; leave it out, or give 1 to train in each task alone"
        )
    # Commands written for fairseq name it on every machine; a single process talks to nobody.
    if cfg.distributed_backend == "nccl" and size > 1 and not gpus:
        raise UserError("`distributed_backend` nccl: needs a GPU, and there is none; use gloo")
    if cfg.max_restarts and is_rank:
        raise SettingError("`max_restarts`: another program started this process; give torchrun the flag")
    if is_rank:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().initialize()  # a crash outside of Python says where
        try:
            return _join(job)
        except Exception as error:
            _tell_agent(error)
            raise
    if size == 1 and not cfg.max_restarts:
        if cfg.local_rank and not (cpu or gpus):
            raise UserError(f"`device_id` {cfg.local_rank}: there is no GPU; add `cpu` to run on the processor")
        return job.main(job.value, World(0, 1, device_of(job.common, cfg.local_rank)))
    _launch(job, size, step)
    return None


def _processes(cfg: DistributedConfig, cpu: bool, gpus: int, step: Step | None) -> int:
    """The number of processes of a job that this process starts, alone or with those of other
    nodes."""
    if step is not None:
        return step.nodes * (cfg.nprocs_per_node or max(gpus, 1))
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


def _number(name: str, default: str = "0", environment: Mapping[str, str] | None = None) -> int:
    """Return the whole number in an environment variable; raise UserError for any other text."""
    text = (os.environ if environment is None else environment).get(name, default)
    if not text.isdecimal():
        raise UserError(f"{name}={text}: the variable must be a whole number")
    return int(text)


# ---- SLURM -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """Task number *rank* of *tasks* that srun started together on *nodes*; one task a node starts
    the ranks of its node, several tasks are ranks."""

    rank: int
    tasks: int
    nodes: int
    local_rank: int
    host: str  # of the first task
    port: int

    def variables(self, gpus: int, port: int) -> dict[str, str]:
        """Return the variables that torchrun would set for this task as a rank."""
        local_rank = 0 if gpus == 1 else self.local_rank  # one GPU: srun bound it to this task
        names = {"RANK": self.rank, "WORLD_SIZE": self.tasks, "LOCAL_RANK": local_rank}
        names["MASTER_PORT"] = port if port > 0 else self.port
        return {"MASTER_ADDR": self.host, **{name: str(value) for name, value in names.items()}}


def step_of(environment: Mapping[str, str]) -> Step | None:
    """Return what srun's variables say of this process; None if it started no others with it.

    Some launchers leave out variables of the step: those of the job say the same then. A batch
    script has SLURM_PROCID and SLURM_NTASKS too, and is no task.
    """
    tasks = _number("SLURM_STEP_NUM_TASKS", "1", environment)
    if tasks == 1:
        return None

    def name_of(*names: str) -> str:
        for name in (f"SLURM_{name}" for name in names):
            if name in environment:
                return name
        raise UserError(
            f"SLURM_{names[0]}: not set, although SLURM_STEP_NUM_TASKS={tasks}; start the tasks with srun or torchrun"
        )

    ranks = ("PROCID",), ("STEP_NUM_NODES", "NNODES", "JOB_NUM_NODES"), ("LOCALID",)
    rank, nodes, local_rank = (_number(name_of(*names), environment=environment) for names in ranks)
    listed = environment[name_of("STEP_NODELIST", "NODELIST", "JOB_NODELIST")]
    # The tasks of one step agree on it, and jobs on one node hardly share it.
    job, number = (_number(f"SLURM_{name}", environment=environment) for name in ("JOB_ID", "STEP_ID"))
    host = "127.0.0.1" if nodes == 1 else first_host(listed)
    return Step(rank, tasks, nodes, local_rank, host, 20000 + (job + 7919 * number) % 10000)


def first_host(nodes: str) -> str:
    """Return the first host of a list of nodes: ``rack[1-2]n[07,09-11],login`` → ``rack1n07``."""
    first = re.match(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodes)
    return re.sub(r"\[\s*(\w+)[^\]]*\]", r"\1", first[0]) if first else ""


# ---- the process that starts the ranks ---------------------------------------------------------


def _launch(job: Job[V, R], size: int, step: Step | None) -> None:
    """Start the ranks of this machine, and wait for them; UserError or SystemExit as the first rank
    that failed."""
    # Imported here: a run of one process needs none of it.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    cfg = job.distributed
    node, nodes, host, port = (0, 1, "127.0.0.1", 0) if step is None else (step.rank, step.nodes, step.host, step.port)
    # Otherwise each process would start a thread for every core.
    if "OMP_NUM_THREADS" not in os.environ and job.common.cpu:
        os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) * nodes // size))
    # The failure that ends the job is reported below, those before restarts by torch.
    handler = logging.StreamHandler() if cfg.max_restarts else logging.NullHandler()
    handler.setLevel(logging.ERROR)
    for logger in map(logging.getLogger, ("torch.distributed.elastic", "torch.multiprocessing")):
        logger.handlers, logger.propagate = [handler], False
    # One store for all starts would give a new start the addresses of the former one's ranks.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    patience = int(max(cfg.distributed_timeout, 300))  # importing torch from a network file system may take minutes
    with tempfile.TemporaryDirectory() as folder, _signals_passed_on() as received:
        config = LaunchConfig(
            min_nodes=nodes,
            max_nodes=nodes,
            nproc_per_node=size // nodes,
            logs_specs=DefaultLogsSpecs(folder),
            run_id="job",
            max_restarts=cfg.max_restarts,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{host}:{max(cfg.distributed_port, 0) or port}",
            rdzv_configs={"is_host": node == 0, "join_timeout": patience, "read_timeout": patience},
            local_addr="127.0.0.1" if nodes == 1 else os.environ.get("SLURMD_NODENAME"),
        )
        # With handlers of its own, the agent would kill ranks that take over 30 seconds to save.
        config.signals_to_handle = "SIGQUIT"
        try:
            codes = elastic_launch(config, _start_rank)((job.common.user_dir, pickle.dumps(job)))
        except ChildFailedError as error:
            number, failure = error.get_first_failure()
            if received and failure.exitcode < 0:  # before the rank could handle the signal
                sys.exit(128 + received[0])
            _report(number, size, failure.exitcode, failure.message)
        except RendezvousError as error:
            raise UserError(
                f"{config.rdzv_endpoint}: the processes cannot connect ({error}); give another `distributed_port`"
            ) from None
    if code := max(code or 0 for code in codes.values()):
        sys.exit(code)


@contextlib.contextmanager
def _signals_passed_on() -> Iterator[list[int]]:
    """Pass the first signal on to the ranks, which decide what to do; a second one kills them and
    ends this process."""
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        ranks = multiprocessing.active_children()
        is_first = len(received) == 1 and bool(ranks)
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid or 0, number if is_first else signal.SIGKILL)
        if not is_first:
            sys.exit(128 + number)

    before = {
        number: signal.signal(number, handle) for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(number: int, size: int, code: int, message: object) -> NoReturn:
    """End as rank *number* did, with its exit code and the agent's message."""
    if code in EXIT_CODES:
        sys.exit(code)
    if code == USER_ERROR and isinstance(message, dict):
        raise UserError(message["message"].partition(": ")[2])
    if isinstance(message, dict):
        reason = message["extraInfo"]["py_callstack"].rstrip()
    elif code >= 0:
        reason = f"exited with code {code}"
    else:
        reason = f"killed by signal {-code} ({signal.Signals(-code).name})"
    print(f"process {number} of {size} failed:\n{printable(with_flags(reason))}", file=sys.stderr, flush=True)
    sys.exit(1)


# ---- a rank ------------------------------------------------------------------------------------


def _start_rank(arguments: tuple[str | None, bytes]) -> int:
    """Run --user-dir and a pickled job as a rank of torch's agent; return the job's exit code."""
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
        _join(job)
    except SystemExit as end:
        if end.code not in EXIT_CODES:
            raise
        return int(end.code or 0)
    except BrokenPipeError:
        os._exit(128 + signal.SIGPIPE)
    except Exception as error:
        if isinstance(error, RuntimeError) and _has_lost_a_rank(error):
            # The agent ends this rank too, and names the first that ended.
            time.sleep(_CAUSE_FIRST)
        mistake = _tell_agent(error)
        if _number("TORCHELASTIC_RESTART_COUNT") < _number("TORCHELASTIC_MAX_RESTARTS"):
            traceback.print_exc()
        sys.stderr.flush()
        # Not sys.exit: threads of a collective may wait for processes that are gone.
        os._exit(USER_ERROR if mistake else 1)
    return 0


def _tell_agent(error: Exception) -> UserError | None:
    """Write *error* to the file from which torch's agent, ours or torchrun's, takes its last
    message: the first rank's that failed. Returns the user's mistake, if it is one."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    mistake = _mistake(error)
    # An agent that ends this rank now would find half a file, and fail itself.
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    get_error_handler().record_exception(mistake or error)
    signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
    return mistake


def _has_lost_a_rank(error: RuntimeError) -> bool:
    text = str(error).lower()
    is_connection = any(words in text for words in ("connection closed", "connection reset", "gloo", "nccl"))
    return is_connection and "timed out" not in text and "timeout" not in text


def _mistake(error: Exception) -> UserError | None:
    """The message of a user's mistake, with flags; None for other errors."""
    if isinstance(error, UserError):
        return UserError(error.with_flags)
    return UserError(with_flags(out_of_memory_message(error))) if is_out_of_memory(error) else None


def _join(job: Job[V, R]) -> R:
    """Run *job* as the rank that torch's variables name."""
    cfg, rank, size = job.distributed, _number("RANK"), _number("WORLD_SIZE")
    if rank >= size:
        raise UserError(f"RANK={rank}: ranks of WORLD_SIZE={size} are numbered from 0")
    world = World(rank, size, device_of(job.common, _number("LOCAL_RANK", str(rank))), cfg.distributed_timeout)
    if size == 1:
        return job.main(job.value, world)
    # Imported later, it would hold on to the group.
    importlib.import_module("torch.distributed.nn.functional")
    if os.environ.get("MASTER_ADDR") in ("127.0.0.1", "localhost"):
        # gloo would listen at the address of the host's name, which other machines may reach.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    backend = cfg.distributed_backend or ("nccl" if world.device.type == "cuda" else "gloo")
    limit, store = timedelta(seconds=cfg.distributed_timeout), None
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("GROUP_WORLD_SIZE") == "1":
            # One store of torchrun serves all starts: a new one must not read the addresses that
            # the ranks before left. Several nodes count starts each for itself.
            shared, _, _ = next(iter(dist.rendezvous("env://", rank, size, timeout=limit)))
            store = dist.PrefixStore(f"attempt {_number('TORCHELASTIC_RESTART_COUNT', '0')}", shared)
        # NCCL connects at once to the GPU that it is told, and need not guess it in a barrier.
        bound = world.device if backend == "nccl" else None
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit, device_id=bound)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"MASTER_ADDR and MASTER_PORT: {str(error).splitlines()[0]}") from None
    # This makes the group that waits for files, before files keep a process busy.
    world.barrier()
    stopped = 0
    try:
        result = job.main(job.value, world)
        # A process that ends early must not look like one that failed.
        world.barrier()
    except SystemExit as end:
        if end.code not in EXIT_CODES:
            raise
        # By a signal: all ranks stop after the same update.
        stopped = int(end.code or 0)
    # What still refers to a group keeps its threads alive, which abort a process as it ends.
    del world
    gc.collect()
    dist.destroy_process_group()
    if stopped:
        raise SystemExit(stopped)
    return result


def run_on_processes(evaluate: Callable[[World], R], common: CommonConfig, cfg: DistributedConfig) -> R | None:
    """Call *evaluate*, a partial function of a module, in as many processes as *cfg* or torchrun
    ask for; by default in one.

    Returns what it returned in this process; None if that only started the others.
    """
    # Without a number training starts a process per GPU;
    # one is enough to evaluate, unless more are asked for.
    cfg = dataclasses.replace(cfg, distributed_world_size=cfg.distributed_world_size or 1)
    return run(Job(_evaluate, evaluate, common, cfg))


def _evaluate(evaluate: Callable[[World], R], world: World) -> R:
    if world.size > 1:
        # A process that was started has no log yet; what all processes log alike is shown once.
        end_at_signals()
        log_to_stderr()
        logging.getLogger().setLevel(logging.INFO if world.is_first else logging.ERROR)
    return evaluate(world)
