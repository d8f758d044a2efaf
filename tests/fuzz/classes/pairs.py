"""Pairs of switches and of choices, each of its own valid."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

from fuzz.classes.lines import lines
from fuzz.classes.numbers import PARSERS
from fuzz.commands import Case


def cases(base: Path) -> Iterator[Case]:
    """The cases."""
    for command, words in lines(base).items():
        if command not in PARSERS or command in ("finetune",):
            continue
        flags = list(_valid_flags(PARSERS[command]()))
        for first, second in itertools.combinations(flags, 2):
            name = f"pairs {command} {' '.join(first)} {' '.join(second)}"
            yield Case(name, (command, *words, *first, *second), ("--", base.name), is_valid=True)


def _valid_flags(parser: argparse.ArgumentParser) -> Iterator[tuple[str, ...]]:
    for action in parser._actions:
        if not action.option_strings or action.dest in ("help", "compile", "profile"):
            continue
        flag = action.option_strings[0]
        if action.nargs == 0:
            yield (flag,)
        for choice in action.choices or () if action.dest not in ("arch", "task") else ():
            yield flag, str(choice)
