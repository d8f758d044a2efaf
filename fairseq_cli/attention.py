"""Plot the attention of a model's heads: over distance, at one position, and by the terms of the
score."""

from __future__ import annotations

import argparse

from fairseq.config.command_settings import AttentionConfig
from fairseq.config.fields import typed
from fairseq.config.parser import Parser
from fairseq.config.settings import CommonConfig, StreamConfig
from fairseq_cli import command
from fairseq_cli.common import evaluation_parser


def get_attention_parser() -> Parser:
    examples = [
        "fairseq-attention data-bin --path own --out attention",
        "fairseq-attention data-bin --path xl --out attention --heads 0:3,15:0",
    ]
    description = "Plot the distances over which a language model's heads attend."
    return evaluation_parser(description, examples, [AttentionConfig], [StreamConfig], without=("compile",))


def main(args: argparse.Namespace) -> dict[str, object]:
    """Plot the attention of the checkpoint of ``--path``
    on ``--gen-subset``; a table goes to stdout.

    Returns:
        The metrics, as in ``results.json``.
    """
    from fairseq.analysis.attention_report import report_attention

    cfg, stream, common = typed(AttentionConfig, args), typed(StreamConfig, args), typed(CommonConfig, args)
    return report_attention(args.data, cfg, stream, common, vars(args))


cli_main = command(main, get_attention_parser)

if __name__ == "__main__":
    cli_main()
