"""Settings in fairseq's groups, and flags of a dataclass of settings."""

from __future__ import annotations

import argparse
from typing import Any

from fairseq.config import fields
from fairseq.dataclass import FairseqDataclass, defaults
from fairseq.dataclass.omegaconf import DictConfig

GROUPS = ("common", "distributed_training", "dataset", "optimization", "checkpoint", "bmuf", "ema")  # of settings
UNREAD = ("common_eval", "generation", "eval_lm", "interactive")  # of other commands, in files that fairseq composed
PARTS = {"model": "arch"} | {name: name for name in ("task", "criterion", "optimizer", "lr_scheduler")}  # their flags
_ENCODERS = {"bpe": "bpe", "tokenizer": "tokenizer"}  # groups of settings: the setting that chooses one


def __getattr__(name: str) -> Any:
    if name != "eval_str_list":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fairseq.config.literals import eval_str_list

    return eval_str_list


def accelerators() -> int:
    """The number of accelerators of this machine."""
    import torch  # command lines are parsed with this module

    return torch.accelerator.device_count()


class ComposedConfig(DictConfig):
    """Settings in fairseq's groups; the flat ones that they were made of are attributes, too, as
    before 0.10."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in vars(self)["_completed"]:
            raise AttributeError(f"the settings have no {name!r}")
        return vars(self)["_completed"][name]

    def __repr__(self) -> str:
        # Each group has all settings: a script's log has them once.
        return repr(DictConfig(**vars(self)["_completed"]))

    def flattened(self) -> argparse.Namespace:
        """The flat settings, with what was changed since."""
        flat, completed = (dict(vars(self)[name]) for name in ("_flat", "_completed"))
        public = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        changed = {
            name: value
            for group in public.values()
            if isinstance(group, DictConfig)
            for name, value in vars(group).items()
            if not name.startswith("_") and value is not completed.get(name)
        }
        added = {name: value for name, value in public.items() if not isinstance(value, DictConfig)}
        return argparse.Namespace(**{**flat, **changed, **added})


def convert_namespace_to_omegaconf(args: argparse.Namespace) -> DictConfig:
    """The flat *args* under the names of fairseq's groups, each of which has all settings."""
    if isinstance(args, ComposedConfig):
        return args
    defaults.complete(completed := argparse.Namespace(**vars(args)))
    flat = vars(completed)
    # As fairseq's default: scripts compare it with 1.
    flat["distributed_world_size"] = flat.get("distributed_world_size") or max(accelerators(), 1)
    parts = {group: str(flat.get(flag) or "") for group, flag in (PARTS | _ENCODERS).items()}
    # Plug-ins read a setting from the group in which their version of fairseq had it, which differs
    # between versions.
    groups = {group: DictConfig(**{**flat, "_name": parts.get(group)}) for group in (*GROUPS, *UNREAD, *parts)}
    return ComposedConfig(**groups, _flat=vars(args), _completed=flat)


def gen_parser_from_dataclass(
    parser: argparse.ArgumentParser,
    dataclass_instance: FairseqDataclass,
    delete_default: bool = False,
    with_prefix: str | None = None,
) -> None:
    """Add the flags of *dataclass_instance* to *parser*, without defaults where an architecture has
    them."""
    settings = type(dataclass_instance).as_config()
    values = {} if delete_default else fields.defaults(settings)
    for action in fields.add_flags(parser, settings):
        # This package's flags have no default in the parser, so that given values can be told from
        # an architecture's; a parser of fairseq's has them.
        if action.dest in values:
            action.default = values[action.dest]
