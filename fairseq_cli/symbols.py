"""Write the bytes or letters of a text as symbols, in three splits with their dictionary."""

from __future__ import annotations

import argparse
from pathlib import Path

from fairseq.config.parser import Parser
from fairseq.text.symbols import convert, split_sizes
from fairseq_cli import command


def get_symbols_parser() -> Parser:
    examples = ["fairseq-symbols enwik8 data --kind bytes", "fairseq-symbols text8 data --kind letters"]
    description = "Write the bytes or letters of a text as symbols, in three splits."
    parser = Parser(description, examples=examples)
    parser.add_argument("source", metavar="TEXT", help="text, one file")
    parser.add_argument("destdir", metavar="DIR", help="folder for the three splits and dict.txt")
    parser.add_argument(
        "--kind", choices=("bytes", "letters"), required=True, help="bytes as numbers, or a to z and spaces"
    )
    return parser


def main(args: argparse.Namespace) -> None:
    """Write ``train.txt``, ``valid.txt``, ``test.txt`` and ``dict.txt``, and print their sizes."""
    source, folder = Path(args.source), Path(args.destdir)
    tokens = convert(source, folder, args.kind)
    for name, size in split_sizes(source.stat().st_size).items():
        added = "" if tokens[name] == size else ", plus one </s>: it ends in the middle of a line"
        print(f"{folder / name}.txt: {size:,} characters{added}")


cli_main = command(main, get_symbols_parser, logs=False)

if __name__ == "__main__":
    cli_main()
