"""Continue prompts with a language model: lines of stdin one by one, or the lines of a file in
batches."""

from __future__ import annotations

import argparse

from fairseq.config.command_settings import InteractiveConfig
from fairseq.config.fields import typed
from fairseq.config.foreign_flags import GENERATION
from fairseq.config.parser import Parser
from fairseq.config.settings import CommonConfig
from fairseq_cli import command, generate
from fairseq_cli.common import evaluation_parser


def get_interactive_generation_parser(default_task: str = "language_modeling") -> Parser:
    examples = [
        "fairseq-interactive own",
        "fairseq-interactive own --input prompts.txt --beam 4",
    ]
    description = "Continue prompts from a terminal, a pipe or a file."
    return evaluation_parser(description, examples, [InteractiveConfig], [], without=("compile",), command=GENERATION)


def get_generation_parser(interactive: bool = False, default_task: str = "language_modeling") -> Parser:
    """The parser of this command or of ``fairseq-generate``, with fairseq's arguments."""
    of_command = get_interactive_generation_parser if interactive else generate.get_generation_parser
    return of_command(default_task)


def main(args: argparse.Namespace) -> None:
    """Print the prompts of ``--input`` with their continuations."""
    from fairseq.inference.interactive import continue_prompts

    continue_prompts(args.data, typed(InteractiveConfig, args), typed(CommonConfig, args), vars(args))


cli_main = command(main, get_interactive_generation_parser)

if __name__ == "__main__":
    cli_main()
