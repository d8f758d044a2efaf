"""Fine-tune an encoder with several seeds and learning rates, and choose the rate by the
development score."""

from __future__ import annotations

from dataclasses import dataclass

from fairseq.config import fields
from fairseq.config.fields import Config, flag
from fairseq.config.parser import Parser
from fairseq.config.settings import CommonConfig, DistributedConfig
from fairseq.tasks.settings import SentencePredictionTaskConfig
from fairseq_cli import command, program


@dataclass(frozen=True)
class FinetuneConfig(Config):
    """Fine-tuning: settings of ``fairseq-finetune``."""

    path: str | None = flag(None, "pre-trained checkpoint", metavar="FILE")
    from_scratch: bool = flag(False, "random initial weights, as a baseline; sizes from `path`")
    seeds: list[int] = flag([1, 2, 3], "seeds, one run each", low=0)
    lrs: list[float] = flag([1e-5, 3e-5, 5e-5], "learning rates to choose from", above=0)
    max_epoch: int = flag(10, "epochs of each run", low=1)
    batch_size: int = flag(16, "rows per update, over all processes", aliases=("--max-sentences",), low=1)
    warmup_ratio: float = flag(0.06, "fraction of updates in which the learning rate warms up", low=0, below=1)
    weight_decay: float = flag(0.01, "weight decay of matrices", low=0)
    clip_norm: float = flag(1.0, "maximum gradient norm (0: no clipping)", low=0)
    predict: str = flag("valid", "comma-separated splits to write predictions for", metavar="SPLIT,…")
    save_dir: str = flag(
        "finetuned", "folder for checkpoints, predictions and results.json", aliases=("--out",), metavar="DIR"
    )
    train_flags: str = flag("", "additional flags of fairseq-train, as one quoted string", metavar="TEXT")


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


main = program("finetune")
cli_main = command(main, get_finetune_parser)

if __name__ == "__main__":
    cli_main()
