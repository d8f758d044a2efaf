"""Every flag that takes a number, at and beyond its bounds."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fairseq.config import fields
from fairseq.models import ARCHITECTURES, MODELS
from fairseq_cli.attention import get_attention_parser
from fairseq_cli.average_checkpoints import get_average_parser
from fairseq_cli.classify import get_classify_parser
from fairseq_cli.common import get_training_parser
from fairseq_cli.eval_lm import get_eval_lm_parser
from fairseq_cli.finetune import get_finetune_parser
from fairseq_cli.generate import get_generation_parser
from fairseq_cli.harness import get_harness_parser
from fairseq_cli.interactive import get_interactive_generation_parser
from fairseq_cli.notes import get_notes_parser
from fairseq_cli.plot import get_plot_parser
from fairseq_cli.preprocess import get_preprocessing_parser
from fairseq_cli.recl import get_recl_parser
from fairseq_cli.validate import get_validation_parser
from fuzz.classes.lines import lines
from fuzz.commands import Case

PARSERS = {
    "train": get_training_parser,
    "eval_lm": get_eval_lm_parser,
    "validate": get_validation_parser,
    "interactive": get_interactive_generation_parser,
    "generate": get_generation_parser,
    "recl": get_recl_parser,
    "attention": get_attention_parser,
    "preprocess": get_preprocessing_parser,
    "plot": get_plot_parser,
    "notes": get_notes_parser,
    "average_checkpoints": get_average_parser,
    "finetune": get_finetune_parser,
    "classify": get_classify_parser,
    "harness": get_harness_parser,
}
NOT_NUMBERS = ("x", "nan", "1e400", "9" * 5000, "")
HUGE = ("2147483647", "1e38", "-1e38")
RUNS_LONG = ("max_update", "max_epoch", "seeds", "lrs", "log_interval")  # their huge values ask for a long run


def cases(base: Path) -> Iterator[Case]:
    """The cases."""
    for command, words in lines(base).items():
        if command not in PARSERS:
            continue
        for action, bounds in number_flags(PARSERS[command]()):
            yield from of_flag(command, words, action, bounds)


def number_flags(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.Action, tuple[Any, ...]]]:
    """The flags of *parser* that take numbers, with their bounds."""
    declared = {field.name: field for cls in parser.configs for field in dataclasses.fields(cls)}  # type: ignore
    if "arch" in parser.choices:  # type: ignore[attr-defined]
        model = MODELS[ARCHITECTURES["shortformer_tiny"].model].config_class
        declared |= {field.name: field for field in dataclasses.fields(model)}
        parser.parse_known_args(["data"])
        fields.add_flags(parser.add_argument_group("model"), model)
    for action in parser._actions:
        kind = str(getattr(declared.get(action.dest), "type", ""))
        is_number = "int" in kind or "float" in kind or getattr(action.type, "__name__", "") == "_count"
        if action.option_strings and is_number and action.nargs is None:
            field = declared.get(action.dest)
            yield action, field.metadata.get("bounds", (None,) * 4) if field is not None else (None,) * 4


def of_flag(command: str, words: list[str], action: argparse.Action, bounds: tuple[Any, ...]) -> Iterator[Case]:
    """The cases of one flag."""
    flag = action.option_strings[0]
    low, high, above, below = bounds
    outside = {str(low - 1) if low is not None else "", str(high + 1) if high is not None else ""}
    outside |= {str(value) for value in (above, below) if value is not None}
    for value in [*sorted(outside - {""}), *NOT_NUMBERS]:
        name = f"numbers {command} {flag} {value[:12]}"
        yield Case(name, (command, *words, f"{flag}={value}"), (flag, *action.option_strings))
    for value in HUGE:
        if action.dest not in RUNS_LONG and command not in ("finetune",):
            name = f"numbers {command} {flag} huge {value}"
            yield Case(name, (command, *words, f"{flag}={value}"), ("--",), is_valid=True)
