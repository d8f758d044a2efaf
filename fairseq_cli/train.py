"""``fairseq-train``: train a model, on one process or several."""

from __future__ import annotations

import argparse
import logging
import sys

from fairseq import distributed, options
from fairseq.distributed import Interruption, Job, World
from fairseq.settings import TrainingSettings
from fairseq.tasks.typed import training_settings
from fairseq.training.job import train


def main(args: argparse.Namespace) -> None:
    """Train what *args* describe, in as many processes as they ask for."""
    settings = training_settings(args)
    distributed.run(Job(train_process, settings, settings.common, settings.distributed))


def train_process(settings: TrainingSettings, world: World) -> None:
    """One process of a run."""
    logging.basicConfig(
        format="%(asctime)s | %(levelname)s | %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        level=logging.INFO if world.is_first else logging.ERROR,
        stream=sys.stderr,
    )
    with Interruption() as interruption:
        number = train(settings, world, interruption)
    if number:
        sys.exit(128 + number)


def cli_main() -> None:
    """The command."""
    options.run_command(main, options.get_training_parser)


if __name__ == "__main__":
    cli_main()
