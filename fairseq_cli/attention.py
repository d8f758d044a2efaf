"""Plot the attention of a model's heads: over distance, at one position, and by the terms of the
score."""

from __future__ import annotations

from dataclasses import dataclass

from fairseq.config.command_settings import ModelPathConfig
from fairseq.config.fields import flag
from fairseq.config.parser import Parser
from fairseq.config.settings import StreamConfig
from fairseq_cli import command, program
from fairseq_cli.common import evaluation_parser


@dataclass(frozen=True)
class AttentionConfig(ModelPathConfig):
    """Attention plots: settings of ``fairseq-attention``."""

    path: str | None = flag(None, "checkpoint", metavar="FILE")
    results_path: str | None = flag(None, "folder for the report, plots and arrays", aliases=("--out",), metavar="DIR")
    first_tokens: int | None = flag(None, "tokens of the split to read (default: all)", low=1)
    positions: list[int] | None = flag(
        None, "predicted tokens to plot separately, from 0 (default: one at random)", aliases=("--position",), low=0
    )
    heads: str | None = flag(
        None, "heads to plot at these positions (default: the widest of three layers)", metavar="LAYER:HEAD,…"
    )
    terms: bool | None = flag(
        None, "plot the four terms of relative attention (default: if the model has them)", negative=True
    )


def get_attention_parser() -> Parser:
    examples = [
        "fairseq-attention data-bin --path own --out attention",
        "fairseq-attention data-bin --path xl --out attention --heads 0:3,15:0",
    ]
    description = "Plot the distances over which a language model's heads attend."
    return evaluation_parser(description, examples, [AttentionConfig], [StreamConfig], hidden=("compile",))


main = program("attention")
cli_main = command(main, get_attention_parser)

if __name__ == "__main__":
    cli_main()
