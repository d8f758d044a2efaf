"""Continue passages of a corpus with a language model, and show the continuations next to the
original text."""

from __future__ import annotations

from dataclasses import dataclass

from fairseq.config.command_settings import GenerationConfig, ShardConfig, TextFormatConfig
from fairseq.config.fields import flag
from fairseq.config.parser import Parser
from fairseq.config.settings import DistributedConfig
from fairseq_cli import command, program
from fairseq_cli.common import evaluation_parser


@dataclass(frozen=True)
class GenerateConfig(GenerationConfig, ShardConfig, TextFormatConfig):
    """Generation: settings of ``fairseq-generate``."""

    text: str | None = flag(
        None, "file of text to take contexts from instead of `gen_subset` (-: stdin)", metavar="FILE"
    )
    gen_subset: str = flag("test", "split to take contexts from", metavar="SPLIT")
    context_tokens: int | None = flag(
        None, "context length in tokens (default: what the model reads, at most 512)", low=1
    )
    num_samples: int = flag(1, "total number of continuations", low=1, high=1_000_000)
    num_contexts: int | None = flag(None, "different contexts to draw (default: `num_samples`)", low=1, high=1_000_000)
    results_path: str | None = flag(
        None, "folder for generate.json and generate.html", aliases=("--out",), metavar="DIR"
    )


def get_generation_parser(default_task: str = "language_modeling") -> Parser:
    examples = [
        "fairseq-generate data-bin --path own/checkpoint_best.pt --out out",
        "fairseq-generate data-bin --path own --context-tokens 64 --beam 4",
    ]
    description = "Continue passages of a corpus and show the results next to the original text."
    return evaluation_parser(description, examples, [GenerateConfig, DistributedConfig], [], hidden=("compile",))


main = program("generate")
cli_main = command(main, get_generation_parser)

if __name__ == "__main__":
    cli_main()
