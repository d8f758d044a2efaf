"""``fairseq-compare``: train settings within one budget each, with several seeds, and test their
differences."""

from __future__ import annotations

import argparse
from pathlib import Path

from fairseq.config.command_settings import CompareConfig
from fairseq.config.fields import typed
from fairseq.config.parser import Parser
from fairseq_cli import command, group


def get_compare_parser() -> Parser:
    examples = [
        "fairseq-compare settings.yaml data-bin --seconds 600",
        "fairseq-compare settings.yaml data-bin --updates 800 --against plain",
    ]
    parser = Parser(
        "Train settings within one budget each and test their differences.",
        [CompareConfig],
        examples=examples,
        first=("out", "seconds", "updates", "seeds", "only", "processes", "eval_flags", "pairs", "against"),
    )
    parser.add_argument(
        "settings", metavar="SETTINGS", help="YAML: NAME: 'flags of fairseq-train'; those of base come before all"
    )
    parser.add_argument("data", metavar="DATA", help="folder made by fairseq-preprocess")
    parser.lists = "fairseq-compare report DIR prints the table of complete runs again."
    return parser


def main(args: argparse.Namespace) -> None:
    """Train and measure what is missing in ``--out``, and print the table."""
    from fairseq.analysis import comparison

    cfg = typed(CompareConfig, args)
    comparison.compare(args.settings, args.data, cfg)
    print(*comparison.report(Path(cfg.out), cfg.against), sep="\n")


def get_report_parser() -> Parser:
    examples = ["fairseq-compare report compared", "fairseq-compare report compared --against plain"]
    parser = Parser("Print the table of a comparison.", examples=examples)
    parser.add_argument("folder", metavar="DIR", help="the folder of --out")
    parser.add_argument("--against", metavar="NAME", help="setting to compare with (default: the first)")
    return parser


def report(args: argparse.Namespace) -> None:
    """Print the table of the complete runs in ``args.folder``."""
    from fairseq.analysis import comparison

    print(*comparison.report(Path(args.folder), args.against), sep="\n")


cli_main = group(
    "Compare settings.",
    default=command(main, get_compare_parser),
    report=command(report, get_report_parser),
)

if __name__ == "__main__":
    cli_main()
