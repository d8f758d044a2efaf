"""Bad inputs by class: every member of a class is made, none is picked by hand."""

from __future__ import annotations

import zlib
from pathlib import Path

from fuzz.classes import (
    changes,
    checkpoints,
    documents,
    machines,
    numbers,
    pairs,
    paths,
    sharded,
    streams,
    tables,
    texts,
)
from fuzz.commands import Case

SHARES = {
    numbers: 4,
    paths: 4,
    documents: 10,
    texts: 3,
    checkpoints: 12,
    streams: 1,
    sharded: 10,
    tables: 1,
    machines: 12,
    changes: 4,
    pairs: 20,
}
"""Of each class, one case in so many: some 2,400 in all, which take four minutes of processor
time."""


def all_cases(base: Path, is_whole: bool = False) -> list[Case]:
    """The cases, made of the inputs in *base*; some twelve thousand if *is_whole*, else some 2,400.

    Which these are depends on the name of a case alone, so that a new case does not change the
    others.
    """
    cases = [(case, share) for kind, share in SHARES.items() for case in kind.cases(base)]
    assert len({case.name for case, _ in cases}) == len(cases)
    return [case for case, share in cases if is_whole or zlib.crc32(case.name.encode()) % share == 0]
