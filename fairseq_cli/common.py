"""The parsers that several commands share."""

from __future__ import annotations

from collections.abc import Sequence

from fairseq.config import fields
from fairseq.config.parser import Parser
from fairseq.config.settings import (
    CheckpointConfig,
    CommonConfig,
    DataConfig,
    DistributedConfig,
    MemoryConfig,
    OptimizationConfig,
    ProfileConfig,
)
from fairseq.config.shared import LanguageModelingTaskConfig

FIRST = (  # of the arguments of training, in --help
    *("data", "arch", "tokens_per_sample", "max_tokens", "batch_size", "lr", "max_update", "max_epoch", "save_dir"),
    *("bf16", "fp16", "cpu"),
)


ONLY_IN_TRAINING = (  # of the settings that evaluation shares with training
    *("fp16_init_scale", "fp16_scale_window", "fp16_scale_tolerance", "min_loss_scale", "threshold_loss_scale"),
    *("ddp_backend", "bucket_cap_mb", "find_unused_parameters", "shard_group_size", "cpu_offload"),
    "checkpoint_activations",
    *("tensorboard_logdir", "metrics_file", "log_file", "wandb_project", "curriculum", "dataset_impl"),
    *("max_valid_steps",),
)


def evaluation_parser(
    description: str,
    examples: Sequence[str],
    configs: Sequence[type],
    reading: Sequence[type] = (DataConfig,),
    hidden: Sequence[str] = (),
) -> Parser:
    """The parser of a command that evaluates a checkpoint: the flags of *configs*, of data and of all commands."""
    optional = [
        (LanguageModelingTaskConfig, ("tokens_per_sample", "sample_break_mode", "add_bos_token")),
        (MemoryConfig, tuple(fields.defaults(MemoryConfig))),
    ]
    hidden = (*hidden, *ONLY_IN_TRAINING)
    parser = Parser(
        description,
        [*configs, *reading, CommonConfig],
        ["task"],
        optional,
        examples=examples,
        hidden=hidden,
        takes_unused=True,
    )
    parser.add_argument("data", metavar="DATA", help="data folder; without --path a model: a checkpoint or its folder")
    return parser


def get_training_parser(default_task: str = "language_modeling") -> Parser:
    """The flags of ``fairseq-train``; flags of the chosen parts join when a command line is parsed."""
    # Imports torch: the settings of models are declared beside their modules.
    from fairseq.models.recipes import recommended

    parser = Parser(
        "Train a model on data from fairseq-preprocess. --arch NAME --help lists the flags of that architecture.",
        [CommonConfig, DataConfig, DistributedConfig, OptimizationConfig, CheckpointConfig, ProfileConfig],
        ["task", "arch", "criterion", "optimizer", "lr_scheduler"],
        examples=[
            "fairseq-train data-bin --arch transformer_lm_demo --max-tokens 4096 --max-update 1000",
            "fairseq-train data-bin --arch transformer_xl_enwik8_base --optimizer adam --lr 0.00025 --batch-size 22",
        ],
        first=FIRST,
        hidden=("gen_subset", "dataset_impl"),
        takes_unused=True,
        recommend=recommended,
    )
    parser.add_argument("data", metavar="DATA", help="folder made by fairseq-preprocess")
    return parser
