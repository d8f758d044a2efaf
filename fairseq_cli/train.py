"""``fairseq-train``: train a model, on one process or several."""

from __future__ import annotations

import argparse

from fairseq.config import options
from fairseq.tasks.typed import training_settings
from fairseq.training import launch


def main(args: argparse.Namespace) -> None:
    """Train the model that *args* describe, on the number of processes they give."""
    launch(training_settings(args))


def cli_main() -> None:
    """Run the command."""
    options.run_command(main, options.get_training_parser)


if __name__ == "__main__":
    cli_main()
