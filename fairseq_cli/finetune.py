"""Fine-tune an encoder with several seeds and learning rates, and choose the rate by the
development score."""

from __future__ import annotations

import argparse

from fairseq.config import fields
from fairseq.config.command_settings import FinetuneConfig
from fairseq.config.fields import typed
from fairseq.config.parser import Parser
from fairseq.config.settings import CommonConfig, DistributedConfig
from fairseq.tasks.settings import SentencePredictionTaskConfig
from fairseq_cli import command
from fairseq_cli.common import get_training_parser


def get_finetune_parser() -> Parser:
    examples = [
        "fairseq-finetune glue/CoLA --glue-task CoLA --path bert/checkpoint_best.pt",
        "fairseq-finetune glue/RTE --glue-task RTE --path bert --seeds 1,2",
    ]
    parser = Parser(
        "Fine-tune an encoder with several seeds and learning rates.",
        [FinetuneConfig, SentencePredictionTaskConfig, CommonConfig, DistributedConfig],
        examples=examples,
        first=("data", "glue_task", "labels", "sentence_pairs", *fields.defaults(FinetuneConfig), "bf16", "cpu"),
    )
    parser.add_argument("data", metavar="DATA", help="folder with train.tsv and dev.tsv, or with input0 and label")
    return parser


def main(args: argparse.Namespace) -> dict[str, object]:
    """Train every learning rate with every seed, print a table,
    and write ``results.json`` to ``--save-dir``.

    Returns:
        The settings, runs and scores, as in ``results.json``.
    """
    from fairseq.evaluation.finetuning import finetune

    cfg, task_cfg = typed(FinetuneConfig, args), typed(SentencePredictionTaskConfig, args)
    return finetune(
        args.data, cfg, task_cfg, typed(CommonConfig, args), typed(DistributedConfig, args), get_training_parser
    )


cli_main = command(main, get_finetune_parser)

if __name__ == "__main__":
    cli_main()
