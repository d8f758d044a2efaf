"""Measure the relative effective context length of each model of a group."""

from __future__ import annotations

import argparse

from fairseq.config.command_settings import ReclConfig
from fairseq.config.fields import typed
from fairseq.config.parser import Parser
from fairseq.config.settings import CommonConfig, StreamConfig
from fairseq_cli import command
from fairseq_cli.common import evaluation_parser


def get_recl_parser() -> Parser:
    examples = [
        "fairseq-recl data-bin --path xl:base --out recl",
        "fairseq-recl data-bin --path xl --max-context 300 --positions 200",
    ]
    description = "Measure the relative effective context length (RECL) of language models."
    return evaluation_parser(description, examples, [ReclConfig], [StreamConfig])


def main(args: argparse.Namespace) -> dict[str, object]:
    """Measure the checkpoints of ``--path`` on ``--gen-subset``;
    the table goes to stdout, progress to stderr.

    Returns:
        The metrics, as in ``results.json``.
    """
    from fairseq.analysis.recl_report import report_recl

    cfg, stream, common = typed(ReclConfig, args), typed(StreamConfig, args), typed(CommonConfig, args)
    return report_recl(args.data, cfg, stream, common, vars(args))


cli_main = command(main, get_recl_parser)

if __name__ == "__main__":
    cli_main()
