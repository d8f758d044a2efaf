"""Turn text into symbols with the tokenizer of a data folder or of flags, or symbols into text."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fairseq.config.command_settings import TextConfig
from fairseq.config.fields import flag, typed
from fairseq.config.parser import Parser
from fairseq.data.folders import load_dictionary
from fairseq.errors import UserError
from fairseq.system.files import atomic_file, prepare_file
from fairseq.system.workers import Workers
from fairseq.text.raw_text import STDIN, TextFormat, format_of
from fairseq.text.tokenization import TokenizeBlock, tokenize_file, tokenize_stream, useful_workers
from fairseq.text.tokenizers import Tokenizer, find_tokenizer
from fairseq.text.tokenizers.tokenizer import chosen_subwords, chosen_words
from fairseq_cli import command


@dataclass(frozen=True)
class TokenizeConfig(TextConfig):
    """Tokenisation: settings of ``fairseq-tokenize``."""

    data: str | None = flag(None, "data or checkpoint folder whose tokenizer is used", metavar="DIR")
    undo: bool = flag(False, "symbols to text instead of text to symbols")
    workers: int = flag(1, "processes", low=1)
    output: str | None = flag(None, "output file (default: stdout)", aliases=("--out",), metavar="FILE")


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
    config = typed(TokenizeConfig, args)
    if config.output is not None:
        prepare_file("--output", config.output, {"TEXT": args.text, "--bpe-codes": config.bpe_codes})
    tokenizer = _tokenizer(config)
    count = useful_workers(config.workers, None if args.text == STDIN else [args.text])
    with Workers(TokenizeBlock(tokenizer, config.undo), count) as workers, _output(config) as out:
        if args.text == STDIN:
            tokenize_stream(sys.stdin.buffer, TextFormat(join_lines=config.join_lines), workers, out)
        else:
            form = TextFormat() if config.undo else format_of(args.text, config.text_field, config.join_lines)
            tokenize_file(args.text, form, workers, out)


def _tokenizer(config: TokenizeConfig) -> Tokenizer:
    """The tokenizer of ``--data``, or of the other flags."""
    words, subwords = chosen_words(config), chosen_subwords(config)
    if config.bpe is not None and subwords is None:
        raise UserError(f"--bpe {config.bpe}: needs its codes; add --bpe-codes FILE")
    if config.data is None:
        if words is None and subwords is None:
            raise UserError("--data or --tokenizer, --bpe: give a data folder with a tokenizer, or the kind of one")
        return Tokenizer(words, subwords)
    if words is not None or subwords is not None:
        raise UserError(f"--data {config.data}: has a tokenizer of its own; leave out --tokenizer and --bpe")
    dictionary = load_dictionary(config.data)
    tokenizer = find_tokenizer(dictionary.path or config.data, dictionary.symbols)
    if tokenizer is None:
        raise UserError(f"--data {config.data}: has no tokenizer; give --tokenizer or --bpe")
    return tokenizer


@contextlib.contextmanager
def _output(config: TokenizeConfig) -> Iterator[BinaryIO]:
    if config.output is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    else:
        with atomic_file(Path(config.output), "--output") as file:
            yield file


cli_main = command(main, get_tokenize_parser, logs=False)

if __name__ == "__main__":
    cli_main()
