"""Evaluate a language model: perplexity, probabilities of words, losses of rare words, speed and
memory."""

from __future__ import annotations

import argparse
import functools
from typing import Any

from fairseq.config.command_settings import (
    EvalLMConfig,
)
from fairseq.config.fields import typed
from fairseq.config.parser import Parser
from fairseq.config.settings import CommonConfig, DataConfig, DistributedConfig
from fairseq_cli import command
from fairseq_cli.common import (
    evaluation_parser,
)


def get_eval_lm_parser(default_task: str = "language_modeling") -> Parser:
    examples = [
        "fairseq-eval-lm own --text test.txt --bf16 --sample sample.txt",
        "fairseq-eval-lm data-bin --path own/checkpoint_best.pt --context-window 40",
    ]
    without = ("train_subset", "valid_subset", "max_tokens_valid", "batch_size_valid", "num_workers")
    return evaluation_parser(
        "Compute the perplexity of a language model.", examples, [EvalLMConfig, DistributedConfig], without=without
    )


def main(args: argparse.Namespace) -> dict[str, Any] | None:
    """Evaluate the checkpoints of ``--path`` on ``--text`` or ``--gen-subset``; print metrics.

    Returns:
        The metrics, as in ``results.json``; None if the work was done in other processes.
    """
    from fairseq.distributed import run_on_processes
    from fairseq.evaluation.language_models import evaluate
    from fairseq.system.files import results_folder

    cfg, common = typed(EvalLMConfig, args), typed(CommonConfig, args)
    with results_folder(cfg.results_path):
        work = functools.partial(evaluate, args.data, cfg, common, typed(DataConfig, args), vars(args))
        return run_on_processes(work, common, typed(DistributedConfig, args))


cli_main = command(main, get_eval_lm_parser)

if __name__ == "__main__":
    cli_main()
