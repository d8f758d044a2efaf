"""Continue passages of a corpus with a language model, and show the continuations next to the
original text."""

from __future__ import annotations

import argparse
import functools
from typing import Any

from fairseq.config.command_settings import GenerateConfig
from fairseq.config.fields import typed
from fairseq.config.foreign_flags import GENERATION
from fairseq.config.parser import Parser
from fairseq.config.settings import CommonConfig, DistributedConfig
from fairseq_cli import command
from fairseq_cli.common import evaluation_parser


def get_generation_parser(default_task: str = "language_modeling") -> Parser:
    examples = [
        "fairseq-generate data-bin --path own/checkpoint_best.pt --out out",
        "fairseq-generate data-bin --path own --context-tokens 64 --beam 4",
    ]
    description = "Continue passages of a corpus and show the results next to the original text."
    return evaluation_parser(
        description, examples, [GenerateConfig, DistributedConfig], [], without=("compile",), command=GENERATION
    )


def main(args: argparse.Namespace) -> list[Any] | None:
    """Continue contexts of ``--gen-subset``; the texts go to stdout and to ``--results-path``,
    progress to stderr.

    Returns:
        The passages; None if the work was done in other processes.
    """
    from fairseq.distributed import run_on_processes
    from fairseq.inference.generation import continue_passages

    common = typed(CommonConfig, args)
    work = functools.partial(continue_passages, args.data, typed(GenerateConfig, args), common, vars(args))
    return run_on_processes(work, common, typed(DistributedConfig, args))


cli_main = command(main, get_generation_parser)

if __name__ == "__main__":
    cli_main()
