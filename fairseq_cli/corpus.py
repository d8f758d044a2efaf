"""``fairseq-corpus``: texts in three splits, for ``fairseq-preprocess``."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from fairseq.config.fields import Config, flag, typed
from fairseq.config.parser import Parser
from fairseq_cli import command, group


@dataclass(frozen=True)
class PydocConfig(Config):
    """Corpus: settings of ``fairseq-corpus pydoc``."""

    max_words: int | None = flag(None, "stop after the article that reaches this many words", low=1)
    packages: str = flag("numpy,torch", "packages to read in addition to the standard library", metavar="NAME,…")
    rare_words: bool = flag(False, "keep rare words, for subwords (default: <unk>)")


def get_pydoc_parser() -> Parser:
    examples = [
        "fairseq-corpus pydoc texts --rare-words",
        "fairseq-corpus pydoc texts --packages numpy,scipy,sympy,torch --rare-words",
    ]
    description = "Make a small corpus of English from documentation of Python."
    parser = Parser(description, [PydocConfig], examples=examples)
    parser.add_argument("destdir", metavar="DIR", help="folder for train.txt, valid.txt and test.txt")
    return parser


def pydoc(args: argparse.Namespace) -> None:
    """Write the three splits to ``args.destdir``, and print their sizes."""
    from fairseq.text.pydoc import make_corpus

    cfg = typed(PydocConfig, args)
    make_corpus(Path(args.destdir), cfg.max_words, [name for name in cfg.packages.split(",") if name], cfg.rare_words)


def get_symbols_parser() -> Parser:
    examples = ["fairseq-corpus symbols enwik8 data --kind bytes", "fairseq-corpus symbols text8 data --kind letters"]
    description = "Write the bytes or letters of a text as symbols, in three splits."
    parser = Parser(description, examples=examples)
    parser.add_argument("source", metavar="TEXT", help="text, one file")
    parser.add_argument("destdir", metavar="DIR", help="folder for the three splits and dict.txt")
    parser.add_argument(
        "--kind", choices=("bytes", "letters"), required=True, help="bytes as numbers, or a to z and spaces"
    )
    return parser


def symbols(args: argparse.Namespace) -> None:
    """Write ``train.txt``, ``valid.txt``, ``test.txt`` and ``dict.txt``, and print their sizes."""
    from fairseq.text.symbols import convert, split_sizes

    source, folder = Path(args.source), Path(args.destdir)
    tokens = convert(source, folder, args.kind)
    for name, size in split_sizes(source.stat().st_size).items():
        added = "" if tokens[name] == size else ", plus one </s>: it ends in the middle of a line"
        print(f"{folder / name}.txt: {size:,} characters{added}")


cli_main = group(
    "Make a corpus: text in three splits, for fairseq-preprocess.",
    pydoc=command(pydoc, get_pydoc_parser, logs=False),
    symbols=command(symbols, get_symbols_parser, logs=False),
)

if __name__ == "__main__":
    cli_main()
