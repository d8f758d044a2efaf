"""Flags and architectures of fairseq 0.12.2 that commands take without reading them, or refuse by
name, and the names that other programs have for flags: ``foreign_flags.txt``.

A flag is refused where fairseq's model, loss or updates would be others with it.
``docs/compatibility.md`` lists them all.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Any, NamedTuple

from fairseq.errors import UserError

TRAINING, EVALUATION, GENERATION, PREPROCESSING = COMMANDS = "tegp"


class ForeignFlag(NamedTuple):
    """What commands do with a flag of fairseq's."""

    name: str  # without dashes
    nargs: int | str | None
    neutral: tuple[str, ...]  # values of a refused flag that change nothing
    advice: str  # what to do instead; empty: the flag has no effect

    def refuse(self, flag: str, value: object) -> None:
        """Raise UserError if *value* would change a result."""
        if self.advice and value not in self.neutral:
            raise UserError(f"{flag}{f' {value}' if isinstance(value, str) else ''}: {self.advice}")


@functools.cache
def _sections() -> dict[str, list[str]]:
    sections: dict[str, list[str]] = {}
    for line in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            rows = sections[line.strip("[]")] = []
        elif line and not line.startswith("#"):
            rows.append(line)
    return sections


@functools.cache
def foreign_flags(command: str) -> dict[str, ForeignFlag]:
    """The flags of fairseq's that *command*, one of :data:`COMMANDS`, takes or refuses, by name."""
    found = {}
    for row in _sections()["flags"]:
        name, commands, default, verdict = row.split(None, 3)
        if command and command in commands:
            condition, _, advice = verdict.partition(": ")
            values = condition.removeprefix("refused unless ").split(" or ") if " unless " in condition else []
            nargs = 0 if default in ("False", "switch") else "?" if values or default.startswith("?") else None
            found[name] = ForeignFlag(name, nargs, tuple(v.replace("empty", "") for v in values), advice)
    return found


@functools.cache
def fairseq_defaults() -> dict[str, Any]:
    """fairseq's default values of the settings in the table, by name: plug-ins read them."""
    rows = [row.split(None, 3) for row in _sections()["flags"]]
    stated = {row[0].replace("-", "_"): row[2].lstrip("?") for row in rows}
    return {name: ast.literal_eval(text) for name, text in stated.items() if text not in ("", "-", "switch")}


def check_architecture(name: str) -> None:
    """Raise UserError for an architecture of fairseq's whose kind of model is not implemented."""
    kind = instead = ""
    for line in _sections()["architectures"]:
        if not line.startswith(" "):
            kind, instead = line.split(" | ")
        elif name in line.split():
            raise UserError(f"--arch {name}: {kind} are not implemented; choose {instead}")


@functools.cache
def flags_with_other_names() -> dict[str, list[str]]:
    """The names that other programs have for a flag, without dashes."""
    found: dict[str, list[str]] = {}
    for flags, others in (row.split(": ") for row in _sections()["names"]):
        for flag in flags.split():
            found.setdefault(flag, []).extend(others.split())
    return found


def meant_by(name: str) -> list[str]:
    """The flags that other programs call *name*, without dashes."""
    return [flag for flag, others in flags_with_other_names().items() if name in others]
