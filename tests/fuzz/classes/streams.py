"""Every command with stdin, stdout or stderr closed, full, or a pipe that nobody reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fuzz.classes.lines import lines
from fuzz.commands import Case

CLOSED = ((0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2))
SUBPROCESSES = ("demo", "finetune")  # they start further commands, which takes seconds


def cases(base: Path) -> Iterator[Case]:
    """The cases."""
    for command, words in lines(base).items():
        if command in SUBPROCESSES:
            words = [*words, "--no-such-flag"]
        for closed in CLOSED:
            name = f"streams {command} without {','.join(map(str, closed))}"
            yield Case(name, (command, *words), ("--", base.name), closed=closed, is_valid=True)
            yield Case(f"{name} help", (command, "--help"), ("--",), closed=closed, is_valid=True)
        yield Case(f"streams {command} broken", (command, *words), ("--", base.name), stdout="|", is_valid=True)
        yield Case(f"streams {command} broken help", (command, "--help"), ("--",), stdout="|", is_valid=True)
        yield Case(
            f"streams {command} full", (command, *words), ("output", base.name, "--"), stdout="/dev/full", is_valid=True
        )
