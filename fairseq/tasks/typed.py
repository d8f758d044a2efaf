"""Conversion of a flat namespace of flags to one frozen value with typed parts."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from fairseq.config import fields
from fairseq.config.registry import ARCHITECTURES, CRITERIONS, MODELS, TASKS, Registry
from fairseq.config.settings import (
    CheckpointConfig,
    ChosenParts,
    CommonConfig,
    DataConfig,
    DistributedConfig,
    OptimizationConfig,
    ProfileConfig,
    Settings,
    TrainingSettings,
)
from fairseq.errors import UserError
from fairseq.optim import OPTIMIZERS
from fairseq.optim.lr_scheduler import LR_SCHEDULERS


def typed_settings(args: argparse.Namespace | Settings, command: type | None = None) -> Settings:
    """Return typed settings from *args*, a parsed command line or a checkpoint's; typed *args* are returned unchanged.

    Args:
        args: flat settings; missing ones get their defaults.
        command: the dataclass of the command's own settings.

    Raises:
        UserError: a value has the wrong type or is out of range, or the architecture is unknown.
    """
    return args if isinstance(args, Settings) else Settings(**_parts(args, command))


def training_settings(args: argparse.Namespace | TrainingSettings) -> TrainingSettings:
    """Return :func:`typed_settings` with the parts that training needs in addition."""
    if isinstance(args, TrainingSettings):
        return args
    settings = TrainingSettings(
        **_parts(args, None),
        distributed=fields.extract(DistributedConfig, args),
        optimization=fields.extract(OptimizationConfig, args),
        checkpoint=fields.extract(CheckpointConfig, args),
        profiling=fields.extract(ProfileConfig, args),
        optimizer=_part(OPTIMIZERS, "optimizer", args),
        lr_scheduler=_part(LR_SCHEDULERS, "lr_scheduler", args),
    )
    if 0 in settings.optimization.lr and not vars(args).get("max_lr"):
        raise UserError("--lr 0: must be greater than 0, unless --max-lr is given and --lr is the minimum")
    return settings


def _parts(args: argparse.Namespace, command: type | None) -> dict[str, Any]:
    given = vars(args)
    names = {field.name: str(given.get(field.name) or "") for field in dataclasses.fields(ChosenParts)}
    model = MODELS[ARCHITECTURES[names["arch"]].model] if names["arch"] else None
    return {
        "common": fields.extract(CommonConfig, args),
        "data": fields.extract(DataConfig, args),
        "data_path": str(given.get("data", "")),
        "chosen": ChosenParts(**names),
        "task": _part(TASKS, "task", args),
        "model": _typed(model, args),
        "criterion": _part(CRITERIONS, "criterion", args),
        "command": None if command is None else fields.extract(command, args),
        "namespace": args,
    }


def _part(registry: Registry[Any], kind: str, args: argparse.Namespace) -> Any:
    name = str(vars(args).get(kind))
    return _typed(registry[name], args) if name in registry else None


def _typed(part: Any, args: argparse.Namespace) -> Any:
    cls = getattr(part, "config_class", None)
    return None if cls is None else fields.extract(cls, args)
