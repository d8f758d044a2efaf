"""The parsers of the commands, made from the registries.

A parser knows at first only the flags that choose parts (``--arch``, ``--task``, …). Once they are read, the chosen
parts' own flags join. What the user leaves open is filled from ``--config``, the architecture and the dataclasses.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from fairseq import config
from fairseq.allocator import keep_freed_memory
from fairseq.errors import UserError, is_out_of_memory, nearest, out_of_memory_message
from fairseq.plugins import import_user_module
from fairseq.settings import (
    AttentionConfig,
    CheckpointConfig,
    CommonConfig,
    DataConfig,
    DistributedConfig,
    EvalLMConfig,
    FinetuneConfig,
    GenerateConfig,
    InteractiveConfig,
    MemoryConfig,
    NotesConfig,
    OptimizationConfig,
    PreprocessConfig,
    ReclConfig,
    StreamConfig,
    ValidateConfig,
)

EPILOG = "A YAML file given with --config FILE sets the same names (dashes or underscores); flags win over it."


@dataclass(frozen=True)
class Choice:
    """A flag that chooses a registered part."""

    name: str
    registry: str
    default: str
    help: str
    aliases: tuple[str, ...] = ()


CHOICES = {
    "task": Choice("task", "fairseq.tasks:TASKS", "language_modeling", "what is learned"),
    "arch": Choice("arch", "fairseq.models:ARCHITECTURES", "transformer_lm", "model architecture", ("-a",)),
    "criterion": Choice("criterion", "fairseq.criterions:CRITERIONS", "cross_entropy", "what is minimised"),
    "optimizer": Choice("optimizer", "fairseq.optim:OPTIMIZERS", "nag", "optimizer"),
    "lr_scheduler": Choice(
        "lr_scheduler", "fairseq.optim.lr_scheduler:LR_SCHEDULERS", "fixed", "schedule of the learning rate"
    ),
}


SOURCE_FORMATS = ("transformer-xl", "hf-transfo-xl", "hf")  # of fairseq-import


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are one line.

    Args:
        configs: settings that are always there.
        choices: names of the flags that choose parts (see :data:`CHOICES`).
        optional: settings, and which of their fields, whose flags are accepted but whose defaults are not filled in:
            what the user leaves open, a checkpoint says.
        settings_file: whether ``--config`` names a YAML file with settings, as everywhere but in ``fairseq-import``.
    """

    def __init__(
        self,
        description: str,
        configs: Sequence[type] = (),
        choices: Sequence[str] = (),
        optional: Sequence[tuple[Callable[[], type], Sequence[str]]] = (),
        settings_file: bool = True,
    ) -> None:
        super().__init__(
            description=description,
            epilog=EPILOG if settings_file else None,
            allow_abbrev=False,
            conflict_handler="resolve",
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
        )
        self.configs = list(configs)
        self.choices = list(choices)
        self.settings_file = settings_file
        if settings_file:
            self.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="YAML file with settings")
        for cls in configs:
            config.add_flags(self.add_argument_group(_title(cls)), cls)
        for load, names in optional:
            group = self.add_argument_group(_title(load()))
            config.add_flags(group, load(), names, otherwise="the checkpoint's")
        for name in choices:
            choice = CHOICES[name]
            self.add_argument(
                config.flag_name(name),
                *choice.aliases,
                dest=name,
                metavar="NAME",
                default=argparse.SUPPRESS,
                help=f"{choice.help} (default: {choice.default})",
            )

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        if unknown and unknown[1].startswith("-"):
            flags = [s for action in self._actions for s in action.option_strings if s.startswith("--")]
            raise UserError(f"{unknown[1].split('=')[0]}: no such flag; {_close_flags(unknown[1], flags)}")
        raise UserError(f"{message}; see --help")


# Flags that fairseq's parser of this command takes and its preprocessing of one language does not read.
PREPROCESSING_SWITCHES = (
    "no-progress-bar cpu tpu fp16 bf16 memory-efficient-fp16 memory-efficient-bf16 fp16-no-flatten-grads profile"
)
PREPROCESSING_VALUES = (
    "seed log-interval log-format tensorboard-logdir task criterion optimizer lr-scheduler fp16-init-scale "
    "fp16-scale-window fp16-scale-tolerance min-loss-scale threshold-loss-scale empty-cache-freq all-gather-list-size "
    "model-parallel-size quantization-config-path scoring target-lang tgtdict nwordstgt thresholdtgt alignfile "
    "align-suffix"
)


class _WithoutEffect(argparse.Action):
    """Accepts a flag and says once that nothing reads it."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        print(f"{option_string}: has no effect on preprocessing", file=sys.stderr)


def get_preprocessing_parser(default_task: str = "language_modeling") -> Parser:
    """The flags of ``fairseq-preprocess``."""
    parser = Parser("Make a dictionary of text, and binary data from text and dictionary.", [PreprocessConfig])
    parser.add_argument("--user-dir", metavar="DIR", default=argparse.SUPPRESS, help="folder with parts of your own")
    for nargs, names in ((0, PREPROCESSING_SWITCHES), (None, PREPROCESSING_VALUES)):
        for name in names.split():
            short = ("-t",) if name == "target-lang" else ()
            parser.add_argument(
                *short, f"--{name}", action=_WithoutEffect, nargs=nargs, default=argparse.SUPPRESS,
                dest=argparse.SUPPRESS, help=argparse.SUPPRESS,
            )  # fmt: skip
    return parser


def get_training_parser(default_task: str = "language_modeling") -> Parser:
    """The flags of ``fairseq-train``; those of the chosen parts join when a command line is parsed."""
    parser = Parser(
        "Train a language model.",
        [CommonConfig, DataConfig, DistributedConfig, OptimizationConfig, CheckpointConfig],
        ["task", "arch", "criterion", "optimizer", "lr_scheduler"],
    )
    parser.add_argument("data", metavar="DATA", help="folder made by fairseq-preprocess")
    return parser


def get_eval_lm_parser(default_task: str = "language_modeling") -> Parser:
    """The flags of ``fairseq-eval-lm``."""
    return _evaluation_parser("Evaluate a language model: perplexity, probabilities, speed.", [EvalLMConfig])


def get_validation_parser(default_task: str | None = None) -> Parser:
    """The flags of ``fairseq-validate``."""
    return _evaluation_parser("Compute a checkpoint's validation loss.", [ValidateConfig])


def get_recl_parser() -> Parser:
    """The flags of ``fairseq-recl``."""
    description = "Measure how long a context each model of a group makes use of."
    return _evaluation_parser(description, [ReclConfig], [StreamConfig])


def get_attention_parser() -> Parser:
    """The flags of ``fairseq-attention``."""
    return _evaluation_parser("Draw where a language model's attention heads look.", [AttentionConfig], [StreamConfig])


def get_interactive_generation_parser(default_task: str = "language_modeling") -> Parser:
    """The flags of ``fairseq-interactive``."""
    return _evaluation_parser("Continue prompts from a terminal, a pipe or a file.", [InteractiveConfig], [])


def get_generation_parser(interactive: bool = False, default_task: str = "language_modeling") -> Parser:
    """The flags of ``fairseq-generate``."""
    if interactive:
        return get_interactive_generation_parser(default_task)
    return _evaluation_parser("Continue passages of a corpus, and set them beside what follows.", [GenerateConfig], [])


def get_import_parser() -> Parser:
    """The flags of ``fairseq-import``."""
    parser = Parser("Import a model from elsewhere into a folder that all commands read.", settings_file=False)
    parser.add_argument("source", metavar="IN", help="file of the authors' (a state dict or a model.pt), or a folder")
    parser.add_argument(
        "--from",
        dest="source_format",
        required=True,
        type=_source_format,
        choices=SOURCE_FORMATS,
        help="origin: Transformer-XL's authors, or a Hugging Face folder (hf: any known kind)",
    )
    parser.add_argument("--out", metavar="DIR", required=True, help="new folder for checkpoint.pt and dict.txt")
    parser.add_argument(
        "--config",
        dest="config_file",
        metavar="FILE.json",
        help="settings of the model under the authors' names: needed for a state dict; win over those of a model.pt",
    )
    return parser


def get_export_parser() -> Parser:
    """The flags of ``fairseq-export``."""
    parser = Parser("Write an encoder as a folder that Hugging Face's transformers loads.", settings_file=False)
    parser.add_argument("source", metavar="CHECKPOINT", help="checkpoint of a bert, roberta or electra model")
    parser.add_argument("--to", dest="target_format", required=True, choices=("hf",), help="format of the folder")
    parser.add_argument("--out", metavar="DIR", required=True, help="new folder")
    parser.add_argument("--data", metavar="DATA", help="data folder or dict.txt (default: beside the checkpoint)")
    parser.add_argument(
        "--half", choices=("discriminator", "generator"), default="discriminator", help="part of ELECTRA to write"
    )
    return parser


def get_finetune_parser() -> Parser:
    """The flags of ``fairseq-finetune``."""
    from fairseq.tasks.sentence_prediction import SentencePredictionConfig

    parser = Parser(
        "Fine-tune an encoder with several seeds and learning rates.",
        [FinetuneConfig, SentencePredictionConfig, CommonConfig, DistributedConfig],
    )
    parser.add_argument("data", metavar="DATA", help="folder with train.tsv and the development file")
    return parser


def get_notes_parser() -> Parser:
    """The flags of ``fairseq-notes``."""
    parser = Parser("Show the notes of rare words in a checkpoint.", [NotesConfig], settings_file=False)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint of a model trained with notes")
    parser.add_argument("data", metavar="DATA", nargs="?", help="its data folder (default: the one of its training)")
    return parser


def _source_format(name: str) -> str:
    if name not in SOURCE_FORMATS:
        raise UserError(f"--from {name}: choose from {', '.join(SOURCE_FORMATS)}")
    return name


def parse_args_and_arch(
    parser: argparse.ArgumentParser,
    input_args: Sequence[str] | None = None,
    parse_known: bool = False,
    modify_parser: Callable[[argparse.ArgumentParser], None] | None = None,
) -> Any:
    """Parse a command line, let the chosen parts add their flags, and fill in what is left open.

    Args:
        parser: one of this module's parsers.
        input_args: the command line; that of the process when None.
        parse_known: return also what is not understood.
        modify_parser: called with the parser before it parses.

    Returns:
        A ``Namespace``; with *parse_known* the namespace and a list.

    Raises:
        UserError: the command line is wrong.
    """
    argv = list(sys.argv[1:] if input_args is None else input_args)
    chosen = _first_look(argv) if getattr(parser, "settings_file", True) else {}
    if "user_dir" in chosen and chosen["user_dir"]:
        import_user_module(str(chosen["user_dir"]))
    parts = _choose(parser, chosen)
    defaults: dict[str, Any] = {}
    for part in parts:
        defaults.update(_add_part_flags(parser, part))
    if modify_parser is not None:
        modify_parser(parser)
    args, unknown = parser.parse_known_args(argv)
    if unknown and not parse_known:
        parser.error(f"unrecognized arguments: {unknown[0]}")
    _fill(parser, args, chosen, parts, defaults)
    return (args, unknown) if parse_known else args


def run_command(main: Callable[[argparse.Namespace], Any], make_parser: Callable[[], Parser]) -> None:
    """Parse the process's command line and run *main*; a user's mistake is one line on stderr and exit code 2."""
    keep_freed_memory()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # until here it ended the process: imports are done
    try:
        main(parse_args_and_arch(make_parser()))
        sys.stdout.flush()
    except UserError as error:
        fail(str(error))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        fail(out_of_memory_message(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EIO, errno.EDQUOT):
            raise
        print(f"{Path(sys.argv[0]).name}: error: the output cannot be written ({error.strerror})", file=sys.stderr)
        sys.stderr.flush()
        os._exit(2)  # what is still in stdout's buffer would fail again


def fail(message: str) -> NoReturn:
    """Print *message* as one line on stderr, and exit with code 2."""
    print(f"{Path(sys.argv[0]).name}: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    sys.exit(2)


def _evaluation_parser(description: str, configs: list[type], reading: Sequence[type] = (DataConfig,)) -> Parser:
    def task_config() -> type:
        from fairseq.tasks.language_modeling import LanguageModelingConfig

        return LanguageModelingConfig

    optional = [
        (task_config, ("tokens_per_sample", "sample_break_mode", "add_bos_token")),
        (lambda: MemoryConfig, tuple(config.defaults(MemoryConfig))),
    ]
    parser = Parser(description, [CommonConfig, *reading, *configs], ["task"], optional)
    parser.add_argument("data", metavar="DATA", help="folder made by fairseq-preprocess")
    return parser


def _first_look(argv: list[str]) -> dict[str, Any]:
    """What of *argv*, and of the --config file it names, decides which other flags there are."""
    look = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    look.error = _ignore  # type: ignore[method-assign, assignment]
    look.add_argument("--config")
    look.add_argument("--user-dir")
    for choice in CHOICES.values():
        look.add_argument(config.flag_name(choice.name), *choice.aliases, dest=choice.name)
    given = vars(look.parse_known_args(argv)[0])
    return {**(config.read_yaml(given["config"]) if "config" in given else {}), **given}


def _ignore(message: str) -> None:
    """The full parser will complain, and knows better."""


def _choose(parser: argparse.ArgumentParser, chosen: dict[str, Any]) -> list[Any]:
    """The parts that *chosen* names, or their defaults."""
    parts = []
    for name in getattr(parser, "choices", []):
        choice = CHOICES[name]
        module, attribute = choice.registry.split(":")
        registry = getattr(importlib.import_module(module), attribute)
        part = registry[str(chosen.get(name, choice.default))]
        if name == "arch":
            from fairseq.models import MODELS

            part = MODELS[part.model]
        if name != "task" or "arch" in parser.choices:  # type: ignore[attr-defined]
            parts.append(part)
    return parts


def _add_part_flags(parser: argparse.ArgumentParser, part: Any) -> dict[str, Any]:
    """Add the flags of *part*; returns the defaults that its ``add_args`` names, which wait for ``--config``."""
    group = parser.add_argument_group(getattr(part, "__name__", str(part)), argument_default=argparse.SUPPRESS)
    if getattr(part, "config_class", None) is not None:
        config.add_flags(group, part.config_class)
    if not hasattr(part, "add_args"):
        return {}
    from fairseq.models import BaseFairseqModel

    ours = list(parser._actions)
    is_model = isinstance(part, type) and issubclass(part, BaseFairseqModel)
    part.add_args(group if is_model else parser)  # what a model's flags leave open, the architecture fills in
    defaults = {}
    for action in parser._actions:
        if action not in ours and action.default is not argparse.SUPPRESS:
            text = isinstance(action.default, str)
            defaults[action.dest] = parser._get_value(action, action.default) if text else action.default
            action.default = argparse.SUPPRESS
    return defaults


def _from_file(parser: argparse.ArgumentParser, path: str) -> dict[str, Any]:
    """The settings in the --config file at *path*, by the names that parsing gives them."""
    known = {action.dest: action.dest for action in parser._actions}
    for action in parser._actions:
        names = action.option_strings
        if isinstance(action, argparse.BooleanOptionalAction):
            names = names[:1]
        known.update((name.lstrip("-").replace("-", "_"), action.dest) for name in names)
    settings = {}
    for name, value in config.read_yaml(path).items():
        if name not in known:
            raise UserError(f"--config {path}: {name}: no such setting; {nearest(name, known)}")
        settings[known[name]] = value
    return settings


def _fill(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    chosen: dict[str, Any],
    parts: list[Any],
    defaults: dict[str, Any],
) -> None:
    """Complete *args*: what is given, then --config, a plug-in's *defaults*, the architecture, the dataclasses'."""
    from_file = _from_file(parser, args.config) if hasattr(args, "config") else {}
    for name, value in {**defaults, **from_file}.items():
        if not hasattr(args, name):
            setattr(args, name, value)
    args.__dict__.pop("config", None)
    for name in getattr(parser, "choices", []):
        setattr(args, name, str(chosen.get(name, CHOICES[name].default)))
    if hasattr(args, "arch"):
        from fairseq.models import ARCHITECTURES

        ARCHITECTURES[args.arch].fill(args)
    for settings in [*getattr(parser, "configs", []), *(getattr(part, "config_class", None) for part in parts)]:
        if settings is not None:
            config.fill(args, settings)
    if getattr(args, "fp16", False) and getattr(args, "bf16", False):
        raise UserError("--fp16 --bf16: choose one of the two")
    if getattr(args, "memory_efficient_fp16", False):
        if getattr(args, "bf16", False):
            raise UserError("--memory-efficient-fp16 --bf16: choose one of the two")
        args.fp16 = True


def _title(cls: type) -> str:
    words = re.sub(r"Config$", "", cls.__name__)
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", words).lower()


def _close_flags(flag: str, flags: list[str]) -> str:
    import difflib

    close = difflib.get_close_matches(flag.split("=")[0], flags, n=2, cutoff=0.6)
    return f"did you mean {' or '.join(close)}?" if close else "see --help"
