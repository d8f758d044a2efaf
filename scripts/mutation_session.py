"""Runs the mutants of a place in one pytest session, started by :mod:`scripts.mutation` inside its ``mutants/`` folder.

A forked process runs all tests without a mutant, and reports the tests that reach each function. Then a process is
forked for each mutant, with everything imported, and runs the tests that reach its function, the fastest first, until
one fails. The session itself runs no test: threads that a test starts, such as autograd's, are missing after a fork.
"""

from __future__ import annotations

import fnmatch
import gc
import json
import os
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

FACTOR, LEAST = 10, 10
"""Limit of a mutant's processor time: a factor of that of its tests, and seconds more."""

WAIT = 5
"""Limit of its time on the clock, as a factor of that of its processor time: the machine may be busy."""


class Session:
    """A pytest plug-in in place of pytest's loop over tests.

    Args:
        results: JSON file of outcomes by mutant; mutants that it has are not run again.
        globs: names of the mutants to run, also those that have a result; none: all without a result.
    """

    def __init__(self, results: Path, globs: list[str]) -> None:
        self.results, self.globs = results, globs
        self.outcomes: dict[str, str] = json.loads(results.read_text()) if results.exists() else {}
        self.seconds: dict[str, float] = {}
        self.reaching: dict[str, list[Any]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        gc.collect()
        gc.freeze()  # a collection in a fork would copy every page
        self._reach(session.items)
        for meta in sorted(Path("fairseq").rglob("*.py.meta")):
            mutants = [name for name in json.loads(meta.read_text())["exit_code_by_key"] if self._is_chosen(name)]
            for name in mutants:
                self.outcomes[name] = self._outcome(name)
            if mutants:
                self.results.write_text(json.dumps(self.outcomes, indent=0))
                words = [self.outcomes[name] for name in mutants]
                counts = ", ".join(f"{words.count(word)} {word}" for word in sorted(set(words)))
                print(f"{str(meta).removesuffix('.meta')}: {len(mutants)} run, {counts}", file=sys.stderr, flush=True)
        return True

    def _is_chosen(self, name: str) -> bool:
        return any(fnmatch.fnmatch(name, glob) for glob in self.globs) if self.globs else name not in self.outcomes

    def _reach(self, items: list[Any]) -> None:
        """Find the tests that reach each function, without those that fail without a mutant."""
        with tempfile.NamedTemporaryFile("r") as file:
            _forked(lambda: Path(file.name).write_text(json.dumps(_reached(items))) and 0, limit=3600)
            reached, self.seconds, failing = json.loads(file.read())
        for test in failing:
            print(f"fails without a mutant, left out: {test}", file=sys.stderr, flush=True)
        by_name = {item.nodeid: item for item in items}
        for function, tests in reached.items():
            self.reaching[function] = [by_name[test] for test in sorted(tests, key=self.seconds.__getitem__)]

    def _outcome(self, name: str) -> str:
        tests = self.reaching.get(name.rpartition("__mutmut_")[0], [])
        if not tests:
            return "untested"

        def run() -> int:
            set_mutant_under_test(name)
            return int(any(_fails(item) for item in tests))

        code = _forked(run, LEAST + int(FACTOR * sum(self.seconds[item.nodeid] for item in tests)))
        return {0: "survived", -signal.SIGXCPU: "timeout", -signal.SIGKILL: "timeout"}.get(code, "killed")


def _fails(item: Any) -> bool:
    return any(report.failed for report in runtestprotocol(item, log=False, nextitem=None))


def _reached(items: list[Any]) -> tuple[dict[str, list[str]], dict[str, float], list[str]]:
    """Run every test: the tests that reach each function, the seconds of each test, and the tests that fail."""
    set_mutant_under_test("stats")
    reached: dict[str, list[str]] = defaultdict(list)
    seconds, failing = {}, []
    for item in items:
        state()._stats.clear()
        before = time.process_time()
        failed = _fails(item)
        seconds[item.nodeid] = time.process_time() - before
        if failed:
            failing.append(item.nodeid)
            continue
        for function in state()._stats:
            reached[function].append(item.nodeid)
    return reached, seconds, failing


def _forked(run: Callable[[], int], limit: int) -> int:
    """Exit code of *run* in a forked process, negative for a signal, with *limit* seconds of processor time."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()  # processes that a test starts end with it
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
            code = run()
        finally:
            os._exit(code)
    end = time.monotonic() + WAIT * limit  # a test that waits for ever takes no processor time
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.002)
    return os.waitstatus_to_exitcode(done[1])


def main() -> int:
    """Run the mutants: ``RESULTS TESTS… -- [MUTANTS…]``."""
    results, *rest = sys.argv[1:]
    cut = rest.index("--")
    plugin = Session(Path(results), rest[cut + 1 :])
    return int(pytest.main(["-q", "--tb=no", "-p", "no:cacheprovider", "--rootdir=.", *rest[:cut]], plugins=[plugin]))


if __name__ == "__main__":
    sys.exit(main())
