"""``fairseq-train``: train a model, on one process or several."""

from __future__ import annotations

import argparse

from fairseq.config import options
from fairseq.config.parser import Parser
from fairseq.config.settings import (
    CheckpointConfig,
    CommonConfig,
    DataConfig,
    DistributedConfig,
    OptimizationConfig,
    ProfileConfig,
    training_settings,
)
from fairseq.models.recipes import recommended
from fairseq.training import launch

FIRST = (  # of the arguments
    *("data", "arch", "tokens_per_sample", "max_tokens", "batch_size", "lr", "max_update", "max_epoch", "save_dir"),
    *("bf16", "fp16", "cpu"),
)


def get_training_parser(default_task: str = "language_modeling") -> Parser:
    """The flags of ``fairseq-train``; those of the chosen parts join when a command line is parsed."""
    parser = Parser(
        "Train a model on data from fairseq-preprocess. --arch NAME --help lists the flags of that architecture.",
        [CommonConfig, DataConfig, DistributedConfig, OptimizationConfig, CheckpointConfig, ProfileConfig],
        ["task", "arch", "criterion", "optimizer", "lr_scheduler"],
        examples=[
            "fairseq-train data-bin --arch transformer_lm_demo --max-tokens 4096 --max-update 1000",
            "fairseq-train data-bin --arch transformer_xl_enwik8_base --optimizer adam --lr 0.00025 --batch-size 22",
        ],
        first=FIRST,
        hidden=("gen_subset", "dataset_impl"),
        takes_unused=True,
        recommend=recommended,
    )
    parser.add_argument("data", metavar="DATA", help="folder made by fairseq-preprocess")
    return parser


def main(args: argparse.Namespace) -> None:
    """Train the model that *args* describe, on the number of processes they give."""
    launch(training_settings(args))


def cli_main() -> None:
    """Run the command."""
    options.run_command(main, get_training_parser)


if __name__ == "__main__":
    cli_main()
