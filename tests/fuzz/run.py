"""Fuzz readers for minutes of CPU time: ``python -m tests.fuzz.run --minutes 10 READER…``
(default: all)."""

from __future__ import annotations

import argparse
import collections
import logging
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from fuzz.check import Found, check
from fuzz.readers import READERS


def main() -> None:
    """Run examples until time is up; print each new failure once, with the number that repeats
    it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("readers", nargs="*", metavar="READER", help=", ".join(READERS))
    parser.add_argument("--minutes", type=float, default=10.0, help="CPU time for each reader")
    parser.add_argument("--first", type=int, default=0, help="number of the first example")
    parser.add_argument("--count", type=int, default=sys.maxsize, help="number of examples")
    args = parser.parse_args()
    logging.disable()
    torch.set_num_threads(1)
    failures = 0
    for name in args.readers or READERS:
        failures += fuzz(name, args.minutes, range(args.first, min(args.first + args.count, sys.maxsize)))
    sys.exit(1 if failures else 0)


def fuzz(name: str, minutes: float, numbers: range) -> int:
    """Fuzz one reader; returns the number of different failures."""
    seen: collections.Counter[str] = collections.Counter()
    accepted = done = 0
    end = time.process_time() + 60 * minutes
    with tempfile.TemporaryDirectory() as work:
        for number in numbers:
            if time.process_time() > end:
                break
            done += 1
            try:
                accepted += not check(name, number, Path(work))
            except Found as found:
                key = _place(found)
                seen[key] += 1
                if seen[key] == 1:
                    print(f"FOUND {found}\n    {key}", flush=True)
    print(
        f"{name}: {done} examples, {accepted} accepted, {sum(seen.values())} failures of {len(seen)} kinds", flush=True
    )
    return len(seen)


def _place(found: Found) -> str:
    """The lines of this project that the failure passed through last."""
    cause = found.__cause__
    frames = traceback.extract_tb(cause.__traceback__) if cause is not None else []
    own = [f"{name}:{frame.lineno}" for frame in frames if (name := _own(frame.filename))]
    return " < ".join(reversed(own[-3:])) or str(found).partition(": ")[2]


def _own(path: str) -> str:
    """*path* within the package; empty for a file elsewhere."""
    return path.rpartition("/fairseq/")[2] if "/fairseq/" in path else ""


if __name__ == "__main__":
    main()
