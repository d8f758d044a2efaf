"""Runs the mutants of a place in one pytest session, started by :mod:`scripts.mutation` inside its
``mutants/`` folder.

A forked process runs all tests without a mutant, and reports the tests that reach each function.
Then a process is forked for each mutant, with everything imported that tests import, and runs tests
that reach its function until one fails: the fast ones that reach few functions first, and so many
that they take *seconds* in all. The session itself runs no test: threads that a test starts, such
as autograd's, are missing after a fork.
"""

from __future__ import annotations

import contextlib
import fnmatch
import gc
import hashlib
import importlib
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from mutmut.mutation.trampoline import set_mutant_under_test
from mutmut.state import state

FACTOR, LEAST = 5, 5
"""Limit of the CPU time of a test on a mutant: a factor of that without, and seconds more."""

WAIT = 4
"""Limit of its wall-clock time, as a multiple of the limit of its CPU time: the machine may be
busy."""

ENDED = (signal.SIGXCPU, signal.SIGALRM, signal.SIGKILL)  # of a process at its limit


class Session:
    """A pytest plug-in in place of pytest's loop over tests.

    Args:
        results: JSON file of outcomes by mutant; mutants that it has are not run again.
        most: seconds of the tests that a mutant meets; one that survives may be killed by others.
        globs: names of the mutants to run, also those that have a result; none: all without a
            result.
    """

    def __init__(self, results: Path, most: float, globs: list[str]) -> None:
        self.results, self.most, self.globs = results, most, globs
        self.outcomes: dict[str, str] = json.loads(results.read_text()) if results.exists() else {}
        self.seconds: dict[str, float] = {}
        self.reaching: dict[str, list[Any]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._reach(session.items)
        gc.collect()
        gc.freeze()  # a collection in a fork would copy every page
        mutants = self._chosen()
        for number, name in enumerate(mutants, start=1):
            self.outcomes[name] = self._outcome(name)
            if number % 20 == 0 or number == len(mutants):
                self.results.write_text(json.dumps(self.outcomes, indent=0))
                print(f"{number} of {len(mutants)} run", file=sys.stderr, flush=True)
        return True

    def _chosen(self) -> list[str]:
        """The mutants to run, those with a result first; the others in a random order, always the
        same.

        If interrupted, they are a sample of each file.
        """
        metas = sorted(Path("fairseq").rglob("*.py.meta"))
        names = [name for meta in metas for name in json.loads(meta.read_text())["exit_code_by_key"]]
        random.Random(0).shuffle(names)
        if not self.globs:
            return [name for name in names if name not in self.outcomes]
        exact = set(self.globs)
        globs = exact.difference(names)
        names = [name for name in names if name in exact or any(fnmatch.fnmatch(name, glob) for glob in globs)]
        return sorted(names, key=lambda name: name not in self.outcomes)

    def _reach(self, items: list[Any]) -> None:
        """Find the tests to run for each function, without those that fail without a mutant; import
        what they do.

        What tests reach is kept beside the results, and found anew for those whose file has
        changed.
        """
        cache = self.results.with_name("reach.json")
        known: dict[str, Any] = json.loads(cache.read_text()) if cache.exists() else {"modules": []}
        digests = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in {item.path for item in items}}
        new = [item for item in items if known.get(item.nodeid, {}).get("digest") != digests[item.path]]
        with tempfile.NamedTemporaryFile("r") as file:
            _forked(lambda: Path(file.name).write_text(json.dumps(_reached(new))) and 0)
            reached, modules = json.loads(file.read())
        known |= {item.nodeid: {**reached[item.nodeid], "digest": digests[item.path]} for item in new}
        known["modules"] = sorted({*known["modules"], *modules})
        cache.write_text(json.dumps(known))
        for module in known["modules"]:
            with contextlib.suppress(Exception):  # a plug-in of a test
                importlib.import_module(module)
        reaching: dict[str, list[Any]] = defaultdict(list)
        for item in items:
            if known[item.nodeid]["fails"]:
                print(f"fails without a mutant, left out: {item.nodeid}", file=sys.stderr, flush=True)
                continue
            self.seconds[item.nodeid] = known[item.nodeid]["seconds"]
            for function in known[item.nodeid]["functions"]:
                reaching[function].append(item)
        for function, tests in reaching.items():
            tests.sort(key=lambda item: self.seconds[item.nodeid] * len(known[item.nodeid]["functions"]))
            total = 0.0
            for item in tests:
                if not total or total + self.seconds[item.nodeid] <= self.most:
                    self.reaching.setdefault(function, []).append(item)
                    total += self.seconds[item.nodeid]

    def _outcome(self, name: str) -> str:
        tests = self.reaching.get(name.rpartition("__mutmut_")[0], [])
        if not tests:
            return "untested"

        def run() -> int:
            set_mutant_under_test(name)
            return int(any(self._fails_in_time(item) for item in tests))

        code = _forked(run)
        return "survived" if code == 0 else "timeout" if -code in ENDED else "killed"

    def _fails_in_time(self, item: Any) -> bool:
        """Return whether a test fails; at a limit of its time the process ends."""
        seconds = LEAST + FACTOR * self.seconds[item.nodeid]
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + seconds) + 1, resource.RLIM_INFINITY))
        signal.setitimer(signal.ITIMER_REAL, WAIT * seconds)
        return _fails(item)


def _fails(item: Any) -> bool:
    return any(report.failed for report in runtestprotocol(item, log=False, nextitem=None))


class _Functions(set[str]):
    """The functions that a test reaches, in its process and in those forked from it, which share a
    file."""

    def __init__(self, file: int) -> None:
        super().__init__()
        self.file = file

    def add(self, function: str) -> None:
        if function not in self:
            super().add(function)
            os.write(self.file, f"{function}\n".encode())  # forked processes share the offset, too

    def take(self) -> set[str]:
        """Return those added so far, and begin anew."""
        found = set(os.pread(self.file, os.fstat(self.file).st_size, 0).decode().split())
        os.lseek(self.file, 0, os.SEEK_SET)
        os.truncate(self.file, 0)
        self.clear()
        return found


def _reached(items: list[Any]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Run tests: of each whether it fails, its seconds, and the functions it reaches; and the
    modules they import."""
    set_mutant_under_test("stats")
    before = set(sys.modules)
    reached = {}
    with tempfile.TemporaryFile() as file:
        functions = _Functions(file.fileno())
        state()._stats = functions
        for item in items:
            start = sum(os.times()[:4])
            fails = _fails(item)
            seconds = sum(os.times()[:4]) - start  # of processes that it started, too
            reached[item.nodeid] = {"fails": fails, "seconds": seconds, "functions": sorted(functions.take())}
    return reached, [name for name in sys.modules if name not in before]


def _forked(run: Callable[[], int]) -> int:
    """Exit code of *run* in a forked process, negative for a signal."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()  # processes that a test starts end with it
            code = run()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    return code


def main() -> int:
    """Run the mutants: ``RESULTS SECONDS TESTS… -- [MUTANTS…]``."""
    results, most, *rest = sys.argv[1:]
    cut = rest.index("--")
    plugin = Session(Path(results), float(most), rest[cut + 1 :])
    return int(pytest.main(["-q", "--tb=no", "-p", "no:cacheprovider", "--rootdir=.", *rest[:cut]], plugins=[plugin]))


if __name__ == "__main__":
    sys.exit(main())
