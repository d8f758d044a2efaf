"""Evaluate a language model: perplexity, probabilities of words, losses of rare words, speed and
memory."""

from __future__ import annotations

from dataclasses import dataclass

from fairseq.config.command_settings import FrequencyConfig, ShardConfig, SubwordMarkConfig, TextFormatConfig
from fairseq.config.fields import flag
from fairseq.config.parser import Parser
from fairseq.config.settings import DistributedConfig
from fairseq.errors import SettingError
from fairseq_cli import command, program
from fairseq_cli.common import (
    evaluation_parser,
)


@dataclass(frozen=True)
class EvalLMConfig(ShardConfig, FrequencyConfig, TextFormatConfig, SubwordMarkConfig):
    """Evaluation: settings of ``fairseq-eval-lm``."""

    text: str | None = flag(None, "file of text to evaluate instead of `gen_subset` (-: stdin)", metavar="FILE")
    results_path: str | None = flag(
        None, "folder for results.json, and the plot of `by_frequency`", aliases=("--out",), metavar="DIR"
    )
    score_documents: str | None = flag(None, "JSON lines with a score for each line or row of `text`", metavar="FILE")
    save_token_scores: str | None = flag(
        None, "NPZ file for tokens and their log-probabilities, in corpus order", metavar="FILE"
    )
    output_word_probs: bool = flag(False, "print every word's log-probability")
    output_word_stats: bool = flag(False, "print every word's count and mean log-probability")
    context_window: int = flag(0, "context tokens before each block that are not scored", low=0)
    sliding_inf: int = flag(-1, "1: score token by token with a cache", choices=(-1, 0, 1), metavar="{1}")
    softmax_batch: int | None = flag(None, "maximum tokens in one softmax, to bound memory", low=1)
    int8: bool = flag(False, "int8 weights, one scale per output; also prints their effect on perplexity")
    sample: str | None = flag(None, "file for a text that the model writes, also printed", metavar="FILE")
    within_words: bool = flag(False, "encoders: also mask the rest of a token's word")
    baseline: str | None = flag(None, "checkpoint to compare with in `by_frequency`", metavar="FILE")

    def check(self) -> None:
        """Raise SettingError if flags of the table of losses by frequency contradict each other."""
        super().check()
        if self.baseline is not None and not self.by_frequency:
            raise SettingError("`baseline`: is compared in `by_frequency`; add it, or leave this out")
        if self.by_frequency and self.score_documents is not None:
            raise SettingError("`by_frequency`: excludes `score_documents`; run one after the other")


def get_eval_lm_parser(default_task: str = "language_modeling") -> Parser:
    examples = [
        "fairseq-eval-lm own --text test.txt --bf16 --sample sample.txt",
        "fairseq-eval-lm data-bin --path own/checkpoint_best.pt --context-window 40",
    ]
    hidden = ("train_subset", "valid_subset", "max_tokens_valid", "batch_size_valid", "num_workers")
    return evaluation_parser(
        "Compute the perplexity of a language model.", examples, [EvalLMConfig, DistributedConfig], hidden=hidden
    )


main = program("eval_lm")
cli_main = command(main, get_eval_lm_parser)

if __name__ == "__main__":
    cli_main()
