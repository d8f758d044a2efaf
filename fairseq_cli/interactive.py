"""Continue prompts with a language model: lines of stdin one by one, or the lines of a file in
batches."""

from __future__ import annotations

from dataclasses import dataclass

from fairseq.config.command_settings import GenerationConfig
from fairseq.config.fields import flag
from fairseq.config.parser import Parser
from fairseq_cli import command, generate, program
from fairseq_cli.common import evaluation_parser


@dataclass(frozen=True)
class InteractiveConfig(GenerationConfig):
    """Generation: settings of ``fairseq-interactive``."""

    input: str = flag("-", "file of prompts, one per line (-: stdin)", metavar="FILE")
    num_samples: int = flag(1, "continuations of each prompt", low=1, high=1_000_000)
    json: bool = flag(False, "print JSON lines instead of text")


def get_interactive_generation_parser(default_task: str = "language_modeling") -> Parser:
    examples = [
        "fairseq-interactive own",
        "fairseq-interactive own --input prompts.txt --beam 4",
    ]
    description = "Continue prompts from a terminal, a pipe or a file."
    return evaluation_parser(description, examples, [InteractiveConfig], [], hidden=("compile",))


def get_generation_parser(interactive: bool = False, default_task: str = "language_modeling") -> Parser:
    """The parser of this command or of ``fairseq-generate``, with fairseq's arguments."""
    of_command = get_interactive_generation_parser if interactive else generate.get_generation_parser
    return of_command(default_task)


main = program("interactive")
cli_main = command(main, get_interactive_generation_parser)

if __name__ == "__main__":
    cli_main()
