"""Classify new text with a fine-tuned encoder: lines of stdin or of a file, or the rows of a
table."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from fairseq.config.fields import Config, flag, typed
from fairseq.config.parser import Parser
from fairseq_cli import command


@dataclass(frozen=True)
class ClassifyConfig(Config):
    """Classification: settings of ``fairseq-classify``."""

    data: str | None = flag(None, "data folder or dict.txt (default: next to the checkpoint)", metavar="DATA")
    format: str = flag("json", "output: JSON lines, or a table with a column for each class", choices=("json", "tsv"))
    batch_size: int = flag(32, "texts per batch", low=1, high=1_000_000)
    cpu: bool = flag(False, "use the CPU even if a GPU is available")


def get_classify_parser() -> Parser:
    examples = [
        "fairseq-classify finetuned/lr3e-05-seed1/checkpoint_best.pt reviews.txt",
        "fairseq-classify finetuned/lr3e-05-seed1 pairs.tsv --format tsv",
    ]
    parser = Parser("Classify text with a fine-tuned encoder.", [ClassifyConfig], examples=examples)
    parser.add_user_dir()
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint of fairseq-finetune")
    text = "one text per line, two texts separated by a tab, or a table (default: -, stdin)"
    parser.add_argument("text", metavar="TEXT", nargs="?", default="-", help=text)
    return parser


def main(args: argparse.Namespace) -> None:
    """Print a prediction for each line of ``args.text``."""
    from fairseq.evaluation.classification import classify_lines

    cfg = typed(ClassifyConfig, args)
    classify_lines(args.checkpoint, args.text, cfg.data, cfg.format, cfg.batch_size, "cpu" if cfg.cpu else "auto")


cli_main = command(main, get_classify_parser)

if __name__ == "__main__":
    cli_main()
