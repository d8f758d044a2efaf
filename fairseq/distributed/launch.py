"""Start, join and end the processes of a job: local workers, torchrun, or processes started by hand."""

from __future__ import annotations

import argparse
import gc
import importlib
import multiprocessing.connection
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from fairseq.allocator import keep_freed_memory
from fairseq.distributed.world import World
from fairseq.errors import UserError, is_out_of_memory, out_of_memory_message
from fairseq.plugins import import_user_module

_USER_ERROR = 2
_LONGEST_MESSAGE = 20_000  # more would not fit into a pipe that nobody reads


def run(main: Callable[[argparse.Namespace, World], Any], args: argparse.Namespace) -> None:
    """Run ``main(args, world)`` in as many processes as *args* ask for.

    Under ``torchrun`` (or with ``--distributed-init-method`` and ``--distributed-no-spawn``) this process is one of
    them; otherwise they are started here, one for each visible GPU or ``--distributed-world-size`` of them. A process
    that fails ends the others, and its message is the job's.

    Raises:
        UserError: CUDA is asked for and absent, or a process failed by a user's mistake.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        _join(main, args, rank, size, int(os.environ.get("LOCAL_RANK", rank)), "env://")
        return
    size = _world_size(args)
    if args.distributed_no_spawn and size > 1:
        if not args.distributed_init_method:
            raise UserError("--distributed-no-spawn: needs --distributed-init-method, to say where processes meet")
        if args.distributed_rank >= size:
            raise UserError(f"--distributed-rank {args.distributed_rank}: {size} processes are numbered from 0")
        _join(main, args, args.distributed_rank, size, args.local_rank, args.distributed_init_method)
    elif size == 1:
        main(args, World(0, 1, device_of(args)))
    else:
        _spawn(main, args, size)


def device_of(args: argparse.Namespace, local_rank: int = 0) -> torch.device:
    """The device that *args* ask for.

    Raises:
        UserError: no GPU is there, and neither is --cpu given while a GPU is needed.
    """
    if getattr(args, "cpu", False) or not torch.cuda.is_available():
        if getattr(args, "distributed_backend", None) == "nccl":
            raise UserError("--distributed-backend nccl: needs a GPU, and none is there; use gloo")
        if not getattr(args, "cpu", False) and getattr(args, "local_rank", 0) > 0 and "RANK" not in os.environ:
            raise UserError(f"--device-id {args.local_rank}: no GPU is there; add --cpu to run on the processor")
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise UserError(f"--device-id {local_rank}: there are {torch.cuda.device_count()} GPUs, numbered from 0")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _world_size(args: argparse.Namespace) -> int:
    gpus = 0 if args.cpu else torch.cuda.device_count()
    size = args.distributed_world_size or max(gpus, 1)
    if size > 1 and not args.cpu and not args.distributed_no_spawn and gpus < size:
        raise UserError(
            f"--distributed-world-size {size}: this machine has {gpus} GPUs; add --cpu to run on the processor"
        )
    return size


def _join(
    main: Callable[[argparse.Namespace, World], Any],
    args: argparse.Namespace,
    rank: int,
    size: int,
    local: int,
    url: str,
) -> None:
    device = device_of(args, local)
    if size > 1:
        importlib.import_module("torch.distributed.nn.functional")  # imported later, it would hold on to the group
        backend = args.distributed_backend or ("nccl" if device.type == "cuda" else "gloo")
        try:
            dist.init_process_group(backend, init_method=url, rank=rank, world_size=size)
        except (RuntimeError, ValueError, OverflowError) as error:
            flag = "--distributed-init-method" if args.distributed_init_method else "--distributed-port"
            raise UserError(f"{flag}: the processes cannot meet at {url} ({str(error).splitlines()[0]})") from None
    main(args, World(rank, size, device))
    if size > 1:
        gc.collect()  # what still refers to the group keeps its threads alive, which abort a process as it ends
        dist.destroy_process_group()


def _spawn(main: Callable[[argparse.Namespace, World], Any], args: argparse.Namespace, size: int) -> None:
    context = torch.multiprocessing.get_context("spawn")
    messages = context.SimpleQueue()
    port = args.distributed_port if args.distributed_port > 0 else _free_port()
    url = args.distributed_init_method or f"tcp://127.0.0.1:{port}"
    if "OMP_NUM_THREADS" not in os.environ and args.cpu:
        os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // size))
    processes = [
        context.Process(target=_worker, args=(main, args, rank, size, url, messages), daemon=False)
        for rank in range(size)
    ]
    try:
        for process in processes:
            process.start()
        failed = _watch(processes)
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
    if failed:
        _report(failed, size, messages)


def _watch(processes: list[Any]) -> dict[int, int]:
    """Wait until all have ended well, or some have not: their ranks and exit codes."""
    while True:
        codes = [process.exitcode for process in processes]
        if any(codes):
            codes = [process.exitcode for process in processes]  # whoever failed first has ended by now
            return {rank: code for rank, code in enumerate(codes) if code}
        if all(code == 0 for code in codes):
            return {}
        time.sleep(0.05)


def _report(failed: dict[int, int], size: int, messages: Any) -> NoReturn:
    """End the job because processes have *failed*, by the first one's word.

    Raises:
        UserError: it failed by a user's mistake.
        SystemExit: it failed otherwise; what it said is on stderr.
    """
    speechless = [rank for rank, code in failed.items() if code not in (1, _USER_ERROR)]
    if speechless:  # what the others say is only that it is gone
        rank, kind = speechless[0], 1
        text = f"killed by signal {-failed[rank]}" if failed[rank] < 0 else f"ended with code {failed[rank]}"
    elif not messages.empty():
        rank, kind, text = messages.get()
    else:
        rank, kind, text = next(iter(failed)), 1, "ended without a word"
    if kind == _USER_ERROR:
        raise UserError(text)
    print(f"process {rank} of {size} failed:\n{text}", file=sys.stderr, flush=True)
    sys.exit(1)


def _worker(
    main: Callable[[argparse.Namespace, World], Any],
    args: argparse.Namespace,
    rank: int,
    size: int,
    url: str,
    messages: Any,
) -> None:
    """One spawned process."""
    keep_freed_memory()
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    try:
        if getattr(args, "user_dir", None):
            import_user_module(args.user_dir)
        _join(main, args, rank, size, rank, url)
    except UserError as error:
        _leave(messages, rank, _USER_ERROR, str(error))
    except KeyboardInterrupt:
        os._exit(130)
    except BaseException as error:
        if is_out_of_memory(error):
            _leave(messages, rank, _USER_ERROR, out_of_memory_message(error))
        _leave(messages, rank, 1, traceback.format_exc())


def _leave(messages: Any, rank: int, kind: int, text: str) -> NoReturn:
    """Say why this process fails, and end it at once, whatever the others are waiting for."""
    messages.put((rank, kind, text[-_LONGEST_MESSAGE:]))
    os._exit(kind)


def _end_with_parent() -> None:
    """End this process when the one that started it is gone, however it went."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
