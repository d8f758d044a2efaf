"""The parsers that several commands share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from fairseq.config import fields
from fairseq.config.foreign_flags import EVALUATION, TRAINING
from fairseq.config.parser import Parser
from fairseq.config.registry import ARCHITECTURES, MODELS
from fairseq.config.settings import (
    CheckpointConfig,
    CommonConfig,
    DataConfig,
    DistributedConfig,
    MemoryConfig,
    OptimizationConfig,
    ProfileConfig,
    ShortForms,
)
from fairseq.config.shared import LanguageModelingTaskConfig
from fairseq.models.recipes import recommended

EVALUATION_FIRST = ("path", "batch_size", "max_tokens", "bf16", "cpu")  # and the settings of the command alone
FIRST = (  # of the arguments of training, in --help
    *("data", "arch", "tokens_per_sample", "max_tokens", "batch_size", "lr", "max_update", "max_epoch", "save_dir"),
    *("save_every", "validate_every", "keep", "reset", "bf16", "fp16", "cpu"),
)


class ListArchitectures(argparse.Action):
    """Prints every architecture with its model and sizes, and exits."""

    def __call__(self, parser: object, *args: object, **kwargs: object) -> NoReturn:
        rows = [("architecture", "model", "layers", "width", "in layers")]
        for name in ARCHITECTURES:
            part = ARCHITECTURES[name]
            rows.append((name, part.model, *_sizes(part.complete({}), MODELS.declaration(part.model))))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
        print("\nin layers: parameters without embeddings, which add about dictionary x width")
        sys.exit(0)


SIZES = (  # names of the settings that say layers, width of layers and of feed-forward networks, by family
    ("decoder_layers", "decoder_embed_dim", "decoder_ffn_embed_dim"),
    ("encoder_layers", "encoder_embed_dim", "encoder_ffn_embed_dim"),
    ("n_layer", "d_model", "d_inner"),
)


def count(number: int) -> str:
    """*number* in thousands, millions or billions: ``3.15 M``."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= unit:
            return f"{number / unit:.0f} {name}" if number >= 100 * unit else f"{number / unit:.3g} {name}"
    return str(number)


def _sizes(settings: Mapping[str, Any], model: Any) -> tuple[str, str, str]:
    """Layers, width, and the parameters of attention
    and feed-forward networks, of a transformer."""
    known = {**fields.defaults(model.config_class), **settings} if model.config_class is not None else dict(settings)
    for names in SIZES:
        if all(name in known for name in names):
            layers, width, inner = (int(known[name]) for name in names)
            # Four matrices of attention and two of the feed-forward network a layer.
            return str(layers), str(width), count(layers * (4 * width * width + 2 * width * inner))
    return str(known.get("decoder_layers", "")), str(known.get("decoder_embed_dim", "")), ""


def evaluation_parser(
    description: str,
    examples: Sequence[str],
    configs: Sequence[type],
    reading: Sequence[type] = (DataConfig,),
    without: Collection[str] = (),
    command: str = EVALUATION,
) -> Parser:
    """The parser of a command that evaluates a checkpoint: the flags of *configs*, of data and of
    all commands, but for settings that training alone reads and those that it is *without*."""
    first = ("data", *_declared(configs[0]), *EVALUATION_FIRST)
    parser = Parser(description, examples=examples, first=first)
    parser.add_settings_file()
    for config in (*configs, *reading, CommonConfig):
        read = [s.name for s in fields.settings_of(config) if not s.metadata.get("training") and s.name not in without]
        parser.add_settings(config, read)
    parser.add_choices("task")
    blocks = ("tokens_per_sample", "sample_break_mode", "add_bos_token")
    parser.add_settings(LanguageModelingTaskConfig, blocks, otherwise="the checkpoint's")
    parser.add_settings(MemoryConfig, otherwise="the checkpoint's")
    parser.command = command
    # A command that reads no text needs the splits of a data folder.
    reads_text = any({"text", "input"} & fields.defaults(config).keys() for config in configs)
    help = "data folder; without --path a model: a checkpoint or its folder" if reads_text else "data folder"
    parser.add_argument("data", metavar="DATA", help=help)
    parser.show_defaults({"sample_break_mode": "none", "distributed_world_size": 1, "nprocs_per_node": "all"})
    return parser


def _declared(config: type) -> list[str]:
    """The settings that *config* declares itself, without inherited ones."""
    return [name for name in fields.defaults(config) if name in vars(config).get("__annotations__", {})]


def get_training_parser(default_task: str = "language_modeling") -> Parser:
    """The flags of ``fairseq-train``; flags of the chosen
    parts join when a command line is parsed."""
    parser = Parser(
        "Train a model on data from fairseq-preprocess. --arch NAME --help lists the flags of that architecture.",
        examples=[
            "fairseq-train data-bin --arch transformer_lm_fast_demo --bf16 --save-dir own",
            "fairseq-train data-bin --arch transformer_lm_fast --decoder-layers 6",
        ],
        first=FIRST,
    )
    parser.add_settings_file()
    parser.add_choices("task", "arch", "criterion", "optimizer", "lr_scheduler", recommend=recommended)
    read = fields.defaults(DataConfig).keys() - {"gen_subset"}
    for config in (CommonConfig, DataConfig, DistributedConfig, OptimizationConfig, CheckpointConfig, ProfileConfig):
        parser.add_settings(config, read if config is DataConfig else None)
    parser.add_short_forms(ShortForms)
    parser.command = TRAINING
    parser.add_argument("data", metavar="DATA", help="folder made by fairseq-preprocess")
    parser.add_argument(
        "--list-archs",
        action=ListArchitectures,
        nargs=0,
        default=argparse.SUPPRESS,
        help="list architectures, with sizes",
    )
    parser.add_argument(
        "--print-settings",
        action="store_true",
        default=argparse.SUPPRESS,
        help="print the settings of this run as a commented file for --config, and exit",
    )
    parser.lists = "--list-archs lists architectures, with sizes."
    return parser
