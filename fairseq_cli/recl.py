"""Measure the relative effective context length of each model of a group."""

from __future__ import annotations

from dataclasses import dataclass

from fairseq.config.command_settings import ModelPathConfig
from fairseq.config.fields import flag
from fairseq.config.parser import Parser
from fairseq.config.settings import StreamConfig
from fairseq.errors import SettingError
from fairseq_cli import command, program
from fairseq_cli.common import evaluation_parser


@dataclass(frozen=True)
class ReclConfig(ModelPathConfig):
    """Context length: settings of ``fairseq-recl``."""

    path: str | None = flag(None, "checkpoints of the group", metavar="FILE[:FILE…]")
    names: str | None = flag(None, "model names in table and plots (default: their folders)", metavar="NAME,…")
    step: int = flag(50, "increment of the context length, in tokens", low=1)
    max_context: int = flag(500, "maximum context length in tokens, a multiple of `step`", low=1)
    threshold: float = flag(0.01, "minimum relative gain in perplexity for a longer context to count", above=0, below=1)
    top_r: list[float] = flag([1.0, 0.5, 0.1], "fractions of hardest positions to measure on", above=0, high=1)
    positions: int = flag(1000, "maximum number of random target positions", low=1)
    whole_windows: bool = flag(False, "read each window in one pass, also in models with memory")
    results_path: str | None = flag(None, "folder for the report, plots and losses", aliases=("--out",), metavar="DIR")

    def check(self) -> None:
        """Raise SettingError if there are fewer than two context lengths to compare, or a part of a
        step is left."""
        super().check()
        if self.max_context < 2 * self.step:
            raise SettingError(
                f"`max_context` {self.max_context}: fewer than two steps of `step` {self.step}; "
                f"give {2 * self.step} or more"
            )
        # Not rounded: the longest context measured would
        # be another than the one that was asked for.
        if rest := self.max_context % self.step:
            below = self.max_context - rest
            raise SettingError(
                f"`max_context` {self.max_context}: not a multiple of `step` {self.step}; "
                f"give {below} or {below + self.step}"
            )


def get_recl_parser() -> Parser:
    examples = [
        "fairseq-recl data-bin --path xl:base --out recl",
        "fairseq-recl data-bin --path xl --max-context 300 --positions 200",
    ]
    description = "Measure the relative effective context length (RECL) of language models."
    return evaluation_parser(description, examples, [ReclConfig], [StreamConfig])


main = program("recl")
cli_main = command(main, get_recl_parser)

if __name__ == "__main__":
    cli_main()
