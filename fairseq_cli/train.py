"""``fairseq-train``: train a model, on one process or several."""

from __future__ import annotations

import argparse
import logging
import sys

from fairseq import distributed, options
from fairseq.distributed import Interruption, World
from fairseq.training.run import train


def main(args: argparse.Namespace) -> None:
    """Train what *args* describe, in as many processes as they ask for."""
    distributed.run(train_process, args)


def train_process(args: argparse.Namespace, world: World) -> None:
    """One process of a run."""
    logging.basicConfig(
        format="%(asctime)s | %(levelname)s | %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        level=logging.INFO if world.is_first else logging.ERROR,
        stream=sys.stderr,
    )
    with Interruption() as interruption:
        number = train(args, world, interruption)
    if number:
        sys.exit(128 + number)


def cli_main() -> None:
    """The command."""
    options.run_command(main, options.get_training_parser)


if __name__ == "__main__":
    cli_main()
