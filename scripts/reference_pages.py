"""Write docs/commands.md, and the tables of flags in docs/compatibility.md, from the parsers
themselves.

python -m scripts.reference_pages          # writes the pages
python -m scripts.reference_pages --check  # exits with 1 if a page in the repository is another
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import yaml

from fairseq.config import fields, options
from fairseq.config.foreign_flags import foreign_flags
from fairseq.config.parser import Parser
from fairseq.config.registry import ARCHITECTURES, CHOICES, MODELS, chosen_part, is_outside

DOCS = Path(__file__).parents[1] / "docs"
# Flags of fairseq, and what is different here; the rest of their page is written by hand.
OF_FAIRSEQ, HEADING = Path(__file__).parent / "compatibility.yaml", "## Flags\n"
NEEDED = {"cosine": "--max-lr 0.5", "triangular": "--max-lr 0.5", "tri_stage": "--phase-ratio 1,0,0 --max-update 9"}
# The module of each command, and the function that makes its parser.
COMMANDS = {
    "fairseq-corpus pydoc": ("corpus", "get_pydoc_parser"),
    "fairseq-corpus symbols": ("corpus", "get_symbols_parser"),
    "fairseq-preprocess": ("preprocess", "get_preprocessing_parser"),
    "fairseq-tokenize": ("tokenize", "get_tokenize_parser"),
    "fairseq-train": ("common", "get_training_parser"),
    "fairseq-eval-lm": ("eval_lm", "get_eval_lm_parser"),
    "fairseq-validate": ("validate", "get_validation_parser"),
    "fairseq-generate": ("generate", "get_generation_parser"),
    "fairseq-interactive": ("interactive", "get_interactive_generation_parser"),
    "fairseq-finetune": ("finetune", "get_finetune_parser"),
    "fairseq-finetune predict": ("finetune", "get_predict_parser"),
    "fairseq-harness": ("harness", "get_harness_parser"),
    "fairseq-compare": ("compare", "get_compare_parser"),
    "fairseq-compare report": ("compare", "get_report_parser"),
    "fairseq-analyze recl": ("analyze", "get_recl_parser"),
    "fairseq-analyze attention": ("analyze", "get_attention_parser"),
    "fairseq-analyze notes": ("analyze", "get_notes_parser"),
    "fairseq-analyze curves": ("analyze", "get_curves_parser"),
    "fairseq-checkpoint average": ("checkpoint", "get_average_parser"),
    "fairseq-checkpoint merge": ("checkpoint", "get_merge_parser"),
    "fairseq-import": ("import_model", "get_import_parser"),
    "fairseq-export": ("export_model", "get_export_parser"),
}
EVERYWHERE = ("--help", "--help-all", "--version", "--config", "--user-dir")
INTRODUCTION = """# Commands and flags

Generated from the parsers by `python -m scripts.reference_pages`.

Every command takes `--help` (the flags that you need most), `--help-all` and `--version`. Commands with tables of
settings take `--config FILE.yaml`, which sets the same flags; the command line overrides it. Commands that run a model
take `--user-dir DIR`, a [plug-in](plugins.md). Each flag is explained once, at the first command that has it.
"""


def page() -> str:
    """The whole page."""
    parsers: dict[str, Parser] = {
        name: getattr(importlib.import_module(f"fairseq_cli.{module}"), function)()
        for name, (module, function) in COMMANDS.items()
    }
    contents = [f"| [{name}](#{name.replace(' ', '-')}) | {parser.description} |" for name, parser in parsers.items()]
    chosen = ", ".join(f"`{choice.flag}`" for choice in CHOICES.values())
    contents += [f"| at the end: {chosen} | flags of the parts that you choose with these |"]
    blocks, known = (
        [INTRODUCTION, "| command | what it does |\n| --- | --- |\n" + "\n".join(contents) + "\n"],
        set[str](),
    )
    for name, parser in parsers.items():
        blocks += [f"## {name}\n", f"{parser.description}\n", *_groups(parser, known)]
    for setting, choice in CHOICES.items():
        parts = MODELS if choice is ARCHITECTURES else choice
        blocks.append(f"## {choice.flag}\n")
        ours = [
            part for part in sorted(parts) if not is_outside(MODELS[part] if choice is ARCHITECTURES else choice[part])
        ]
        blocks += [block for part in ours for block in _part(setting, part)]
    return "\n".join(blocks)


def _groups(parser: Parser, known: set[str]) -> Iterator[str]:
    """Tables of the flags of *parser*; what is *known* from an earlier command is named only."""
    tables: dict[str, list[str]] = {}
    again = []
    for title, action in sorted(parser.arguments, key=lambda entry: parser.headings.index(entry[0])):
        if action.help == argparse.SUPPRESS or set(EVERYWHERE) & {*action.option_strings}:
            continue
        row = _row(action)
        if action.option_strings and row in known:
            again.append(f"`{action.option_strings[0]}`")
        else:
            known.add(row)
            subject = "" if title in ("positional arguments", "options") else f"{title[:1].upper()}{title[1:]}:\n\n"
            tables.setdefault(subject, []).append(row)
    for subject, rows in tables.items():
        yield f"{subject}| flag | meaning |\n| --- | --- |"
        yield "\n".join(rows) + "\n"
    if again:
        yield f"As above: {', '.join(again)}.\n"


def _row(action: argparse.Action) -> str:
    metavar = action.metavar if isinstance(action.metavar, str) else "|".join(map(str, action.choices or ()))
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{metavar or action.dest}`"
    value = f" `{metavar}`" if metavar and action.option_strings and action.nargs != 0 else ""
    # A bar would separate cells of the table.
    cells = (
        re.sub(r"\s+", " ", cell).replace("|", ", ").replace("<", "&lt;")
        for cell in (names + value, str(action.help or "").replace("%%", "%"))
    )
    return f"| {' | '.join(cells)} |"


def _part(setting: str, part: str) -> Iterator[str]:
    config = getattr(MODELS[part] if setting == "arch" else chosen_part(setting, part), "config_class", None)
    if config is None:
        return
    parser = argparse.ArgumentParser(add_help=False)
    rows = [_row(action) for action in fields.add_flags(parser, config) if action.help != argparse.SUPPRESS]
    if rows:
        yield f"### `{part}`\n"
        yield "| flag | meaning |\n| --- | --- |"
        yield "\n".join(rows) + "\n"


def compatibility() -> str:
    """docs/compatibility.md, with the tables of what commands do with the flags of fairseq."""
    written = (DOCS / "compatibility.md").read_text(encoding="utf-8").partition(HEADING)[0]
    sections = yaml.safe_load(OF_FAIRSEQ.read_text(encoding="utf-8"))
    return "\n".join([written + HEADING, *(block for section in sections for block in _section(**section))])


def _section(
    title: str, command: str, flags: str, text: str = "", remarks: Mapping[str, str] = MappingProxyType({})
) -> Iterator[str]:
    yield f"### {title}\n"
    if text:
        yield f"{text.strip()}\n"
    treated = _treatment(command, flags.split())
    rows: dict[tuple[str, str], list[str]] = {}
    for flag, (status, advice) in treated.items():
        if status == "same" and flag in remarks:
            status = "refused" if remarks[flag].startswith("not supported") else "different"
        rows.setdefault((status, advice or remarks.get(flag, "")), []).append(flag)
    yield "| flag | here | remark |\n| --- | --- | --- |"
    for row in sorted(rows, key=lambda row: ("same", "no effect", "refused", "different").index(row[0])):
        names = ", ".join(f"`{flag}`" for flag in rows[row])
        yield f"| {names} | {' | '.join(row)} |".replace("  ", " ")
    yield ""


def _treatment(command: str, flags: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Whether each of *flags* is read, has no effect or is refused by *command*, and what to do
    instead."""
    name, *words = command.split()
    module, function = COMMANDS[f"fairseq-{name}"]
    parser: Parser = getattr(importlib.import_module(f"fairseq_cli.{module}"), function)()
    needed = ["--lr", "0.1", *NEEDED.get(words[1], "").split()] if "--lr-scheduler" in words else []
    args = options.parse_args_and_arch(parser, [*(["data"] if name != "preprocess" else []), *words, *needed])
    # What an evaluation takes from the checkpoint has no value.
    read, foreign = {*vars(args), *parser.settings}, foreign_flags(parser.command)
    found = {}
    for flag in flags:
        if parser.by_flag[flag].dest in read:
            found[flag] = "same", ""
        else:
            advice = foreign[flag[2:]].advice
            found[flag] = ("refused", advice) if advice else ("no effect", "")
    return found


PAGES: dict[str, Callable[[], str]] = {"commands.md": page, "compatibility.md": compatibility}


def main() -> int:
    """Write or check the pages."""
    texts = {DOCS / name: make() for name, make in PAGES.items()}
    if sys.argv[1:] == ["--check"]:
        return int(any(not path.exists() or path.read_text(encoding="utf-8") != text for path, text in texts.items()))
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
