"""Compute the validation loss of checkpoints, as in training."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from fairseq.config.command_settings import FrequencyConfig, ShardConfig
from fairseq.config.fields import flag
from fairseq.config.parser import Parser
from fairseq.config.settings import DistributedConfig
from fairseq_cli import command, program
from fairseq_cli.common import evaluation_parser


@dataclass(frozen=True)
class ValidateConfig(ShardConfig, FrequencyConfig):
    """Model: settings of ``fairseq-validate``."""

    keep_notes: bool = flag(False, "read notes of rare words; print losses by distance and two controls")
    rare_words: bool = flag(False, "losses of rare words in notes.txt, by distance, and with the words hidden")
    check_data: bool = flag(False, "first compare all data files with checksums.txt and the dictionary")
    results_path: str | None = flag(
        None, "folder for results.json, and plots of `by_frequency`", aliases=("--out",), metavar="DIR"
    )


def get_validation_parser(default_task: str | None = None) -> Parser:
    examples = [
        "fairseq-validate data-bin --path checkpoints/checkpoint_best.pt",
        "fairseq-validate data-bin --path bert --valid-subset valid,test",
        "fairseq-validate data-bin --check-data",
    ]
    parser = evaluation_parser(
        "Compute the validation loss of a checkpoint.",
        examples,
        [ValidateConfig, DistributedConfig],
        hidden=("train_subset", "gen_subset"),
    )
    parser.left_open = ("seed", "task")
    parser.show_defaults(dict.fromkeys((*parser.left_open, "sample_break_mode"), "the checkpoint's"))
    help = "loss function; its settings are the checkpoint's or the defaults (default: the checkpoint's)"
    parser.add_argument("--criterion", metavar="NAME", default=argparse.SUPPRESS, help=help)
    return parser


main = program("validate")
cli_main = command(main, get_validation_parser)

if __name__ == "__main__":
    cli_main()
