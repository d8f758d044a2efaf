"""``fairseq-finetune``: fine-tune a pre-trained model with several seeds and learning rates, choose
the rate by the development score, and classify new text with the result."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from fairseq.config import fields
from fairseq.config.command_settings import FinetuneConfig
from fairseq.config.fields import Config, flag, typed
from fairseq.config.parser import Parser
from fairseq.config.settings import CommonConfig, DistributedConfig
from fairseq.tasks.settings import SentencePredictionTaskConfig
from fairseq_cli import command, group
from fairseq_cli.common import get_training_parser


def get_finetune_parser() -> Parser:
    examples = [
        "fairseq-finetune glue/CoLA --glue-task CoLA --path bert/checkpoint_best.pt",
        "fairseq-finetune glue/RTE --glue-task RTE --path bert --seeds 1,2",
    ]
    parser = Parser(
        "Fine-tune an encoder or a decoder with several seeds and learning rates.",
        [FinetuneConfig, SentencePredictionTaskConfig, CommonConfig, DistributedConfig],
        examples=examples,
        first=("data", "glue_task", "labels", "sentence_pairs", *fields.defaults(FinetuneConfig), "bf16", "cpu"),
    )
    parser.add_argument("data", metavar="DATA", help="folder with train.tsv and dev.tsv, or with input0 and label")
    parser.lists = "fairseq-finetune predict CHECKPOINT TEXT classifies new text; predict --help shows its flags."
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


# ---- predict -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PredictConfig(Config):
    """Classification: settings of ``fairseq-finetune predict``."""

    data: str | None = flag(None, "data folder or dict.txt (default: next to the checkpoint)", metavar="DATA")
    format: str = flag("json", "output: JSON lines, or a table with a column for each class", choices=("json", "tsv"))
    batch_size: int = flag(32, "texts per batch", low=1, high=1_000_000)
    cpu: bool = flag(False, "use the CPU even if a GPU is available")


def get_predict_parser() -> Parser:
    examples = [
        "fairseq-finetune predict finetuned/lr3e-05-seed1 reviews.txt",
        "fairseq-finetune predict finetuned/lr3e-05-seed1 pairs.tsv --format tsv",
    ]
    parser = Parser("Classify new text with a fine-tuned model.", [PredictConfig], examples=examples)
    parser.add_user_dir()
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint of fairseq-finetune, or its folder")
    text = "one text per line, two texts separated by a tab, or a table (default: -, stdin)"
    parser.add_argument("text", metavar="TEXT", nargs="?", default="-", help=text)
    return parser


def predict(args: argparse.Namespace) -> None:
    """Print a prediction for each line of ``args.text``, or each row if it is a table."""
    from fairseq.evaluation.classification import classify_lines

    cfg = typed(PredictConfig, args)
    classify_lines(args.checkpoint, args.text, cfg.data, cfg.format, cfg.batch_size, "cpu" if cfg.cpu else "auto")


cli_main = group(
    "Fine-tune an encoder or a decoder.",
    default=command(main, get_finetune_parser),
    predict=command(predict, get_predict_parser),
)

if __name__ == "__main__":
    cli_main()
