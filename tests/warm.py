"""Commands in forks of this process, which has imported everything: a start costs no imports.

A fork differs from a process of its own in what it inherits (modules, their caches) and in how it
starts further processes: it forks them too. ``runs.command`` starts one of its own.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import logging
import multiprocessing
import os
import runpy
import select
import signal
import socket
import stat
import subprocess
import sys
import traceback
import types
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import runs
import torch

# What jobs of several processes, replicated and sharded, import on their way: seconds.
PRELOADED = (
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.nn.functional", "torch.distributed.checkpoint"),
    *("torch.distributed.launcher.api", "torch.distributed.elastic.utils.store", "torch.utils.serialization"),
    *("numpy.random", "yaml", "fairseq.models.recipes"),
    *(f"fairseq.kernels.{part}" for part in ("attention", "cross_entropy", "dropout", "layers")),
)

# Kills a client of `interpreter` by SIGKILL, its fork first: a fork that outlives its client would
# still hold what the next start needs, such as the lock of a folder.
KILL = signal.SIGQUIT

# A client of `interpreter`: it imports nothing that takes time. Other calls of Python it leaves to
# Python. It ends as its fork does, passes signals on to it, and takes it along if it is killed
# itself.
CLIENT = """#!{python} -SE
import os, socket, sys
words = sys.argv[1:]
if words[:1] == ["-u"]:
    words = words[1:]
script = words and words[0].endswith(".py")
if not words or words[0] not in ("-c", "-m") and not script:
    os.execv({python!r}, [{python!r}, *words])
import json, signal
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    request = json.dumps([words, os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [len(request).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(request)
    fork = int.from_bytes(server.recv(8), "big")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: os.kill(fork, number))
    signal.signal(signal.SIGQUIT, lambda *_: os.kill(fork, signal.SIGKILL))
    code = int(server.recv(100) or b"1")
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if code != -signal.SIGKILL else None
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def preload() -> None:
    """Import what forks would import, each for itself."""
    for name in PRELOADED:
        importlib.import_module(name)
    # An agent looks for the name of the method of each event that it logs: among the sources of all
    # frames and modules, which are many here. That took a second a start.
    dynamic_rendezvous = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    dynamic_rendezvous.get_method_name = lambda depth=2: "event"  # type: ignore[attr-defined]


def start(script: str | Path, *flags: Any, variables: Mapping[str, str] = {}, **settings: Any) -> subprocess.Popen[str]:
    """Start a script, e.g. ``train.py`` at the root, in a fork.

    Args:
        script: its path below the root; ``-m``: the first of *flags* is a module.
        flags: command-line words, as :func:`runs.words` takes them.
        variables: of its environment, beside those of a process that uses one thread.
        settings: of :class:`subprocess.Popen`; by default its output is piped.
    """
    preload()
    # An interpreter ignores SIGPIPE and SIGXFSZ; subprocess would restore them.
    defaults = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "restore_signals": False}
    words = [script if script == "-m" else str(runs.ROOT / script), *runs.words(*flags)]
    become = functools.partial(_become, words, runs.environment(**variables))
    # The function before the program is executed never returns, so that it never is.
    return subprocess.Popen(["never"], preexec_fn=become, **{**defaults, **settings})


def command(script: str | Path, *flags: Any, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script as :func:`runs.command` does, in a fork."""
    with start(script, *flags, variables=variables) as process:
        stdout, stderr = process.communicate(timeout=runs.TIMEOUT)
    return subprocess.CompletedProcess(script, process.returncode, stdout, stderr)


@contextlib.contextmanager
def torchrun(folder: Path, *words: Any, **settings: Any) -> Iterator[subprocess.Popen[str]]:
    """A torchrun of two processes that runs *words*, a script and flags; all of them are forks.

    Args:
        folder: for the rendezvous with the server of forks.
        words: flags of torchrun, a script and its flags.
        settings: of :class:`subprocess.Popen`; by default its output is piped.
    """
    flags = "torch.distributed.run --standalone --nproc-per-node 2"
    with interpreter(folder) as program:
        job = start("-m", flags, *words, variables={"PYTHON_EXEC": str(program)}, **settings)
        with job:
            try:
                yield job
            finally:
                job.kill()


@contextlib.contextmanager
def interpreter(folder: Path) -> Iterator[Path]:
    """A program in *folder* that stands for ``python`` in shell scripts: scripts and modules run in
    forks.

    It is ``sys.executable`` there, too.
    """
    program, address = folder / "python", str(folder / "python.socket")
    program.write_text(CLIENT.format(python=sys.executable, address=address))
    program.chmod(0o700)
    preload()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        server = multiprocessing.get_context("fork").Process(target=_serve, args=(listener, program))
        server.start()
    try:
        yield program
    finally:
        server.kill()
        server.join()


def _serve(listener: socket.socket, program: Path) -> None:
    sys.executable = str(program)
    parent = os.getppid()
    while os.getppid() == parent:
        if not _readable(listener.fileno(), seconds=1):
            continue
        client, _ = listener.accept()
        if os.fork() == 0:
            os._exit(_answer(client))
        client.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _readable(*descriptors: int, seconds: float | None = None) -> list[int]:
    """Those of *descriptors* that can be read, waiting for one; ``select`` takes none above
    1,023."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(None if seconds is None else 1000 * seconds)]


def _answer(client: socket.socket) -> int:
    """Run what *client* asks for, and send it the exit code."""
    size, streams, _, _ = socket.recv_fds(client, 8, 3)
    with client.makefile("rb") as request:
        words, folder, environment = json.loads(request.read(int.from_bytes(size, "big")))
    pid = os.fork()
    if pid == 0:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.chdir(folder)
        _become(words, environment)
    client.sendall(pid.to_bytes(8, "big"))
    ended = os.pidfd_open(pid)
    if ended not in _readable(ended, client.fileno()):
        os.kill(pid, signal.SIGKILL)  # the client, which sends nothing more, was killed
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        client.sendall(str(code).encode())
    return 0


def _become(words: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Be a new interpreter that runs *words*: a script, or ``-m`` and a module, and flags."""
    code = 1
    try:
        _close_pipes()
        os.environ.clear()
        os.environ.update(environment)
        _forget()
        if words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(compile(words[1], "<string>", "exec"), vars(_new_main()))
        elif words[0] == "-m":
            sys.path.insert(0, os.getcwd())
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _close_pipes() -> None:
    """Close the pipes and sockets of the tests' process: their other ends wait. Files of data stay
    open.

    Their numbers stay taken: an object that still has one, and closes or writes to it, must not
    meet a new pipe.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3, max(map(int, os.listdir("/dev/fd"))) + 1):
        with contextlib.suppress(OSError):
            if stat.S_ISFIFO(mode := os.fstat(number).st_mode) or stat.S_ISSOCK(mode):
                os.dup2(null, number, inheritable=False)


def _new_main() -> types.ModuleType:
    sys.modules["__main__"] = types.ModuleType("__main__")
    return sys.modules["__main__"]


def _forget() -> None:
    """Put aside what the tests' process has that a new one has not."""
    gc.enable()
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if "HF_MODULES_CACHE" in os.environ:  # transformers reads it when it is imported
        library = importlib.import_module("transformers.dynamic_module_utils")
        library.HF_MODULES_CACHE = os.environ["HF_MODULES_CACHE"]  # type: ignore[attr-defined]
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = torch.multiprocessing.get_context = lambda method=None: fork  # type: ignore[assignment]
