"""Bad inputs by class: every member of a class is made, none is picked by hand."""

from __future__ import annotations

from pathlib import Path

from fuzz.classes import checkpoints, documents, numbers, paths, streams, texts
from fuzz.commands import Case


def all_cases(base: Path) -> list[Case]:
    """Every case, made of the inputs in *base*."""
    kinds = (numbers, paths, documents, texts, checkpoints, streams)
    cases = [case for kind in kinds for case in kind.cases(base)]
    assert len({case.name for case in cases}) == len(cases)
    return cases
