"""``fairseq-train``: train a model, on one process or several."""

from __future__ import annotations

import argparse

from fairseq.config.settings import training_settings
from fairseq_cli import command
from fairseq_cli.common import get_training_parser


def main(args: argparse.Namespace) -> None:
    """Train the model that *args* describe, on the number of processes they give."""
    # Imported here, because they import torch: a command line that is wrong is answered before.
    from fairseq import distributed
    from fairseq.training import training_job
    from fairseq.training.effective import commented_settings

    if vars(args).pop("print_settings", False):
        print(commented_settings(training_settings(args)), end="")
        return
    distributed.run(training_job(training_settings(args)))


cli_main = command(main, get_training_parser, logs=False)

if __name__ == "__main__":
    cli_main()
