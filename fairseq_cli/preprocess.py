"""``fairseq-preprocess``: build a dictionary from text and write binary corpora."""

from __future__ import annotations

import argparse

from fairseq.config.command_settings import PreprocessConfig
from fairseq.config.fields import typed
from fairseq.config.foreign_flags import PREPROCESSING
from fairseq.config.parser import Parser
from fairseq_cli import command


def get_preprocessing_parser(default_task: str = "language_modeling") -> Parser:
    examples = [
        "fairseq-preprocess --trainpref text.txt --valid-fraction 0.05 --learn-bpe 6000",
        "fairseq-preprocess --srcdict data-bin/dict.txt --testpref test.txt --out new",
    ]
    parser = Parser("Build a dictionary from text and binarize the text.", [PreprocessConfig], examples=examples)
    parser.add_user_dir()
    parser.command = PREPROCESSING
    return parser


def main(args: argparse.Namespace) -> None:
    """Write the dictionary and the corpora to ``--destdir``."""
    from fairseq.preprocessing import preprocess

    preprocess(typed(PreprocessConfig, args))


cli_main = command(main, get_preprocessing_parser, logs=False)

if __name__ == "__main__":
    cli_main()
