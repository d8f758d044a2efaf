"""Commands run on bad inputs in forks of one warm process: exit code, stderr, files and bounds of
each case.

``python -m tests.fuzz.commands [--whole] [--every N] [--workers N] [PREFIX…]`` runs the cases whose
names begin with PREFIX.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import json
import os
import re
import resource
import select
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from fairseq_cli import check_environment

MEMORY = 1 << 30  # bytes more than the warm process has
PROCESSOR = 20  # seconds of CPU time
IDLE = 10  # seconds without CPU time, after which a case waits for something that never comes
LARGEST_FILE = 1 << 28


@dataclass(frozen=True)
class Case:
    """A command line with bad input.

    Attributes:
        name: class and member, unique.
        words: command (module of ``fairseq_cli``) and flags.
        names: flags and files, of which the error line must hold one.
        write: writes inputs of the case into its folder, the current one of the command.
        closed: descriptors that are closed when the command starts, as by ``>&-``.
        stdin: what the command reads from stdin.
        stdout: the file for its output; by default one that is dropped. ``|``: a pipe that nobody
            reads.
        is_valid: whether the command may also accept the input and end with exit code 0.
        output: the file or folder that the command may write to if it does.
        change: what the process does before the command starts, e.g. lower a limit.
        call: what it runs in place of a command.
        meanwhile: what another process does again and again while the command runs; it is given a
            count.
        has_little: a limit is lowered: that there is no memory, no descriptor or no thread may be
            the error.
        shrinks: another process shortens a file that this one may have mapped into its memory,
            which ends it by SIGBUS.
    """

    name: str
    words: tuple[str, ...]
    names: tuple[str, ...]
    write: Callable[[Path], Any] | None = None
    closed: tuple[int, ...] = ()
    stdin: bytes = b""
    stdout: str = ""
    is_valid: bool = False
    output: str = ""
    change: Callable[[], Any] | None = None
    call: Callable[[], Any] | None = None
    meanwhile: Callable[[int], Any] | None = None
    has_little: bool = False
    shrinks: bool = False


@dataclass
class Ended:
    """A command that has ended: exit code (negative: by a signal), stderr, seconds of processor
    time."""

    code: int
    stderr: str
    seconds: float


def run(case: Case, folder: Path) -> Ended:
    """Run *case* in *folder*, in a fork."""
    (folder / ".stdin").write_bytes(case.stdin)
    pid = os.fork()
    if pid == 0:
        _become(case, folder)
    other = _repeat(case.meanwhile, folder) if case.meanwhile is not None else None
    seconds, since, is_idle = 0.0, time.monotonic(), False
    descriptor = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while not poll.poll(1000):
        used = _processor_time(pid)
        if used > seconds + 0.01:
            seconds, since = used, time.monotonic()
        if time.monotonic() - since > IDLE:
            is_idle = True
            os.kill(pid, signal.SIGKILL)
    os.close(descriptor)
    _, status, usage = os.wait4(pid, 0)
    if other is not None:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
    stderr = (folder / ".stderr").read_bytes().decode("utf-8", "surrogateescape")
    stderr += "\nHANGS: waits" if is_idle else ""
    return Ended(os.waitstatus_to_exitcode(status), stderr, usage.ru_utime + usage.ru_stime)


def _repeat(action: Callable[[int], Any], folder: Path) -> int:
    """Repeat *action* in *folder*, in a fork, until it is killed; return its number."""
    pid = os.fork()
    if pid:
        return pid
    os.chdir(folder)
    for count in range(sys.maxsize):
        with contextlib.suppress(OSError):
            action(count)
        time.sleep(0.001)
    os._exit(0)


def _processor_time(pid: int) -> float:
    """Seconds of a process and of those that it has started, such as a compiler."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0.0
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # also of children that have ended
    return own + sum(_processor_time(int(child)) for child in children)


def _become(case: Case, folder: Path) -> NoReturn:
    """Be the command of *case*, as the interpreter would run it."""
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        errors = os.open(".stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        if case.stdout == "|":
            reading, out = os.pipe()
            os.close(reading)
        else:
            out = os.open(case.stdout or ".stdout", os.O_WRONLY | os.O_CREAT | (0 if case.stdout else os.O_TRUNC))
        for target, descriptor in ((0, os.open(".stdin", os.O_RDONLY)), (1, out), (2, errors)):
            os.dup2(descriptor, target)
        _open_streams(case.closed)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR, PROCESSOR + 1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
        _obey_permissions()
        if case.change is not None:
            case.change()
        check_environment()
        if case.call is not None:
            case.call()
            os._exit(0)
        command, *words = case.words
        sys.argv = [f"fairseq-{command}", *words]
        importlib.import_module(f"fairseq_cli.{command}").cli_main()
        code = 0
        if sys.stdout is not None:
            sys.stdout.flush()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        with contextlib.suppress(Exception):
            os.write(2, traceback.format_exc().encode("utf-8", "replace"))
    finally:
        os._exit(code)


def _obey_permissions() -> None:
    """Give up what lets root pass folders that are closed to all, as they are to any other user."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = struct.pack("<Ii", 0x20080522, 0), ctypes.create_string_buffer(24)  # of 64 capabilities
    if libc.capget(header, data) == 0:
        sets = list(struct.unpack("<6I", data.raw))
        sets[0] &= ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, of the effective set
        libc.capset(header, struct.pack("<6I", *sets))


def _open_streams(closed: Sequence[int]) -> None:
    """Give ``sys`` new streams, as an interpreter does: those of this process know its own files
    and pipes."""
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
    for number in closed:
        setattr(sys, ("stdin", "stdout", "stderr")[number], None)
        os.close(number)


def fault(case: Case, ended: Ended) -> str:
    """What *ended* did that a command must not do; empty if nothing."""
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    tail = " / ".join(lines[-3:])[-600:]
    if "HANGS" in ended.stderr:
        return f"waits for ever: {tail}"
    if ended.code == -signal.SIGXCPU or ended.seconds > PROCESSOR:
        return f"takes more than {PROCESSOR} s of CPU time"
    if "Traceback" in ended.stderr or "panicked" in ended.stderr or "Exception ignored" in ended.stderr:
        return f"traceback: {_origin(ended.stderr)} {tail}"
    if re.search(r"out of (host )?memory", ended.stderr) and not case.has_little:
        return f"memory: {tail}"
    if ended.code == 0 and case.is_valid or ended.code == -signal.SIGBUS and case.shrinks:
        return ""
    if case.closed and 2 in case.closed and ended.code == 2:
        return ""
    if case.stdout == "|" and ended.code in (0, 128 + signal.SIGPIPE) and "error" not in ended.stderr:
        return ""
    if ended.code != 2:
        return f"exit code {ended.code}: {tail}"
    errors = [line for line in lines if "error: " in line]
    if len(errors) != 1 or lines[-1] != errors[0]:
        return f"{len(errors)} lines of errors: {tail}"
    if not any(name in errors[0] for name in case.names):
        return f"names none of {', '.join(case.names)}: {tail}"
    if len(errors[0]) > 2200 or any(not letter.isprintable() for letter in errors[0]):
        return f"an error line of {len(errors[0])} characters, or with control characters"
    return ""


def _origin(stderr: str) -> str:
    frames = re.findall(r'File "[^"]*/(fairseq(?:_cli)?/[^"]+)", line (\d+)', stderr)
    return " < ".join(f"{path}:{line}" for path, line in reversed(frames[-3:]))


def contents(folder: Path) -> dict[str, Any]:
    """What *folder* holds: bytes of small files, sizes and times of others, targets of links."""
    found: dict[str, Any] = {}
    for place, folders, names in os.walk(folder):
        for name in [*folders, *names]:
            path = Path(place) / name
            if place == str(folder) and name in (".stdin", ".stdout", ".stderr"):
                continue
            if path.is_symlink():
                found[str(path)] = os.readlink(path)
            elif path.is_file():
                size = path.stat().st_size
                found[str(path)] = path.read_bytes() if size < 1 << 16 else (size, path.stat().st_mtime_ns)
            else:
                found[str(path)] = path.stat().st_mode
    return found


def stamps(folder: Path) -> dict[str, Any]:
    """Sizes and times of the files in *folder*."""
    found: dict[str, Any] = {}
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            found |= stamps(Path(entry.path))
        else:
            about = entry.stat(follow_symlinks=False)
            found[entry.path] = about.st_size, about.st_mtime_ns, about.st_ino
    return found


def check(case: Case, base: Path, before: dict[str, Any]) -> tuple[str, float]:
    """Run *case* in a new folder; return its fault, empty if it has none, and its seconds of
    CPU time.

    *before* is what *base* holds, the inputs that cases share.
    """
    with tempfile.TemporaryDirectory(dir=base.parent) as place:
        folder = Path(place)
        if case.write is not None:
            case.write(folder)
        inputs = contents(folder)
        ended = run(case, folder)
        found = fault(case, ended)
        after = contents(folder)
        changed = [path for path, content in inputs.items() if after.get(path) != content]
        changed = [path for path in changed if "/.changing/" not in path]  # by the other process of the case
        if case.output and ended.code == 0:
            changed = [path for path in changed if not path.startswith(str(folder / case.output))]
        leftovers = [path for path in after if path.endswith(".tmp")]
        if not found and changed:
            found = f"changed {', '.join(changed)}"
        if not found and leftovers:
            found = f"left {', '.join(leftovers)}"
        if not found and stamps(base) != before:
            found = "changed an input of another case"
        for path, _, _ in os.walk(folder):
            with contextlib.suppress(OSError):
                os.chmod(path, 0o700)
    return found, ended.seconds


def run_cases(cases: Sequence[Case], base: Path, report: Callable[[Case, str, float], Any]) -> dict[str, str]:
    """Run *cases*; return the faults by name."""
    before = stamps(base)
    faults = {}
    for case in cases:
        found, seconds = check(case, base, before)
        report(case, found, seconds)
        if found:
            faults[case.name] = found
            if found.startswith("changed an input"):
                before = stamps(base)
    return faults


@dataclass
class Result:
    """Seconds of CPU time of the cases of each class, and faults by name."""

    times: dict[str, list[float]]
    faults: dict[str, str]


def run_share(args: argparse.Namespace, worker: int) -> Result:
    """Run the cases of one of the workers on inputs of its own; print faults and slow cases."""
    from fuzz.classes import all_cases
    from fuzz.inputs import make_inputs

    times: dict[str, list[float]] = {}

    def report(case: Case, found: str, seconds: float) -> None:
        times.setdefault(case.name.split(" ")[0], []).append(seconds)
        if found:
            print(f"FAULT {case.name}: {found}", flush=True)
        elif seconds > args.slow:
            print(f"slow {case.name}: {seconds:.1f} s", flush=True)

    with tempfile.TemporaryDirectory() as place:
        base = Path(place) / "base"
        make_inputs(base)
        gc.collect()
        gc.freeze()  # a collection in a fork would copy every page that holds an object
        cases = [case for case in all_cases(base, args.whole) if any(map(case.name.startswith, args.prefixes))]
        faults = run_cases(cases[:: args.every][worker :: args.workers], base, report)
    return Result(times, faults)


def run_workers(args: argparse.Namespace) -> list[Result]:
    """Run all cases in forks of this process; return the result of each.

    Raises:
        RuntimeError: a worker died.
    """
    with tempfile.TemporaryDirectory() as place:
        files = [Path(place) / f"{worker}.json" for worker in range(args.workers)]
        pids = []
        for worker, file in enumerate(files):
            pids.append(os.fork())
            if pids[-1] == 0:
                _work(args, worker, file)
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
        if any(statuses):
            raise RuntimeError("a worker died")
        return [Result(**json.loads(file.read_text())) for file in files]


def _work(args: argparse.Namespace, worker: int, file: Path) -> NoReturn:
    code = 1
    try:
        file.write_text(json.dumps(vars(run_share(args, worker))))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def main() -> None:
    """Run the cases, or every n-th of them; print faults, counts, and CPU time of each
    class."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prefixes", nargs="*", default=[""], metavar="PREFIX")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="run every N-th case only")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes that share the cases")
    parser.add_argument("--whole", action="store_true", help="run every member of every class, some 20 minutes")
    parser.add_argument("--slow", type=float, default=3.0, help="seconds of CPU time to report")
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from fuzz.inputs import warm_up

    started = time.monotonic()
    warm_up()
    results = run_workers(args)
    times: dict[str, list[float]] = {}
    for result in results:
        for kind, seconds in result.times.items():
            times.setdefault(kind, []).extend(seconds)
    for kind, seconds in times.items():
        print(f"{kind}: {len(seconds)} cases, {sum(seconds):.1f} s")
    faults = sum(len(result.faults) for result in results)
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    used = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    print(
        f"{sum(map(len, times.values()))} cases, {faults} faults; CPU time {used:.0f} s, "
        f"wall-clock time {time.monotonic() - started:.0f} s with {args.workers} workers"
    )
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
