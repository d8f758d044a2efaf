"""Folders of other users, file systems, limits, variables of the environment, and threads."""

from __future__ import annotations

import functools
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fuzz import kernel
from fuzz.classes.lines import lines
from fuzz.classes.paths import OUTPUTS, replaced
from fuzz.commands import Case

SUBPROCESSES = ("demo", "demo_corpus", "finetune")  # they start further commands, which takes seconds
VARIABLES = {
    "HOME": ("/nope", "", "\udcff"),
    "TMPDIR": ("/nope", "/proc", ""),
    "XDG_CACHE_HOME": ("/proc/nope", "relative", "/dev/null"),
    "COLUMNS": ("x", "0", "-1", "9" * 30),
    "TERM": ("nix", ""),
    "LC_ALL": ("nix",),
    "OMP_NUM_THREADS": ("x", "0", "-1", "1000000"),
    "TQDM_MININTERVAL": ("0.5",),
    "CC": ("false", "/nope", "", "sh -c"),
    "CFLAGS": ("-nope", "'"),
    "CUDA_VISIBLE_DEVICES": ("x",),
    "TOKENIZERS_PARALLELISM": ("x",),
    "RANK": ("0", "x", "-1"),
    "WORLD_SIZE": ("1", "x", "0"),
    "SLURM_PROCID": ("x", "5"),
    "SLURM_NTASKS": ("x", "2"),
    "FAIRSEQ_CC": ("x",),
}
LIMITS = {
    "descriptors": (resource.RLIMIT_NOFILE, (0, 4, 8, 12, 16, 24)),
    "memory": (resource.RLIMIT_AS, (1 << 24, 1 << 26, 1 << 28)),
    "file": (resource.RLIMIT_FSIZE, (1 << 14,)),
}


def cases(base: Path) -> Iterator[Case]:
    """The cases."""
    yield from _others_folders(base)
    yield from _file_systems(base)
    yield from _limits(base)
    yield from _variables(base)
    yield from _threads(base)


def _others_folders(base: Path) -> Iterator[Case]:
    """Outputs in a folder that may be read and not written to; ``paths`` has those that may not be
    entered."""
    for command, words in lines(base).items():
        for flag in OUTPUTS.get(command, ()) if command not in SUBPROCESSES else ():
            suffix = ".png" if (command, flag) == ("plot", "--results-path") else ""
            yield Case(
                f"users {command} {flag}",
                (command, *replaced(words, flag, f"other/x{suffix}")),
                (str(flag), "other", "DIR"),
                lambda folder: (folder / "other").mkdir(0o500),
            )


def _file_systems(base: Path) -> Iterator[Case]:
    """Outputs on a read-only or full file system, or on one from which nothing is executed."""
    if reason := kernel.why_not():
        print(f"skipped: file systems: {reason}", file=sys.stderr)
        return
    for command, words in lines(base).items():
        for flag in OUTPUTS.get(command, ()) if command not in SUBPROCESSES else ():
            for kind in ("read-only", "full", "noexec"):
                suffix = ".png" if (command, flag) == ("plot", "--results-path") else ""
                yield Case(
                    f"systems {command} {flag} {kind}",
                    (command, *replaced(words, flag, f"place/x{suffix}")),
                    (str(flag), "place", "DIR"),
                    lambda folder: (folder / "place").mkdir(),
                    change=kernel.mount(kind),
                    # What is small fits into the last page.
                    is_valid=kind != "read-only",
                )
    for kind in ("read-only", "full", "noexec"):
        yield Case(
            f"systems cache {kind}",
            ("interactive", *lines(base)["interactive"]),
            ("--",),
            lambda folder: (folder / "place").mkdir(),
            change=_both(kernel.mount(kind), functools.partial(os.environ.__setitem__, "XDG_CACHE_HOME", "place")),
            is_valid=True,
        )


def _both(first: Callable[[], Any], second: Callable[[], Any]) -> Callable[[], None]:
    def change() -> None:
        first()
        second()

    return change


def _limits(base: Path) -> Iterator[Case]:
    """Few descriptors, little memory, short files, and no threads, of every command."""
    for command, words in lines(base).items():
        if command in SUBPROCESSES:
            continue
        for kind, (number, values) in LIMITS.items():
            for value in values:
                yield Case(
                    f"limits {command} {kind} {value}",
                    (command, *words),
                    ("",),
                    change=functools.partial(_lower, number, value),
                    is_valid=True,
                    has_little=True,
                )
        yield Case(
            f"limits {command} threads", (command, *words), ("",), change=_no_threads, is_valid=True, has_little=True
        )


def _lower(number: int, value: int) -> None:
    """Lower a limit to *value* more than the process has."""
    if number == resource.RLIMIT_AS:
        value += int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    if number == resource.RLIMIT_NOFILE:
        value += max(map(int, os.listdir("/proc/self/fd"))) + 1
    resource.setrlimit(number, (value, value))


def _no_threads() -> None:
    """As ``ulimit -u`` of which nothing is left, which does not bind root."""

    def start(*arguments: Any, **settings: Any) -> None:
        raise RuntimeError("can't start new thread")

    threading._start_new_thread = start  # type: ignore[attr-defined]
    threading._start_joinable_thread = start  # type: ignore[attr-defined]


def _variables(base: Path) -> Iterator[Case]:
    for command, words in lines(base).items():
        for name, values in VARIABLES.items() if command not in SUBPROCESSES else ():
            for value in values:
                yield Case(
                    f"variables {command} {name} {value[:12]!r}",
                    (command, *words),
                    (name, "--"),
                    change=functools.partial(_set, name, value),
                    is_valid=True,
                )


def _set(name: str, value: str) -> None:
    os.environ[name] = value
    # Kernels that are not found in a cache are compiled, for seconds: in the cases of file systems
    # only.
    if name in ("HOME", "TMPDIR", "XDG_CACHE_HOME"):
        os.environ["CC"] = "false"


def _threads(base: Path) -> Iterator[Case]:
    """One model in several threads."""
    for call in ("sample", "score", "both"):
        yield Case(f"threads {call}", (), (), call=functools.partial(_use, base, call), is_valid=True)


def _use(base: Path, call: str) -> None:
    from fairseq.hub import LanguageModel

    model = LanguageModel.from_pretrained(base / "lm" / "checkpoint_last.pt", base / "data")
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            for count in range(4):
                if call == "score" or (call == "both" and number % 2):
                    model.score("ax by " * (1 + number + count))
                else:
                    model.sample(["ax"] * (1 + 5 * number), max_tokens=3)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
