"""``fairseq-tokenize``: turn text into symbols with the tokenizer of a data folder or of flags, or
symbols into text."""

from __future__ import annotations

import argparse

from fairseq.config.command_settings import TokenizeConfig
from fairseq.config.fields import typed
from fairseq.config.parser import Parser
from fairseq_cli import command


def get_tokenize_parser() -> Parser:
    examples = [
        "fairseq-tokenize book.txt.gz --tokenizer moses --workers 4 --out book.tokens",
        "fairseq-tokenize generated.tokens --data data-bin --undo",
    ]
    parser = Parser("Turn text into symbols, or symbols into text.", [TokenizeConfig], examples=examples)
    parser.add_argument("text", metavar="TEXT", nargs="?", default="-", help="text file (default: -, stdin)")
    parser.add_user_dir()
    return parser


def main(args: argparse.Namespace) -> None:
    """Write a line of symbols for each line of text,
    or with ``--undo`` of text for each line of symbols."""
    from fairseq.preprocessing import tokenize

    tokenize(args.text, typed(TokenizeConfig, args))


cli_main = command(main, get_tokenize_parser, logs=False)

if __name__ == "__main__":
    cli_main()
