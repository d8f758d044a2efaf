"""``fairseq.checkpoint_utils``: models from checkpoints, as scripts written for fairseq load
them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fairseq import checkpoint
from fairseq.checkpoint.standins import Attributes
from fairseq.config import fields
from fairseq.config.command_settings import ShardConfig
from fairseq.config.fields import parse_dict
from fairseq.config.namespaces import namespace_of
from fairseq.config.settings import DistributedConfig
from fairseq.dataclass.omegaconf import DictConfig
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.errors import UserError
from fairseq.inference.loading import OF_DATA, OF_THE_COMMAND, load_models
from fairseq.models.base import BaseFairseqModel
from fairseq.models.fairseq_decoder import FairseqDecoder
from fairseq.models.views import logits_model
from fairseq.tasks.fairseq_task import FairseqTask

# Scripts override the settings of a checkpoint by all flags that a command line gives.
OF_COMMANDS = {
    *OF_THE_COMMAND,
    *OF_DATA,
    *fields.defaults(ShardConfig),
    *fields.defaults(DistributedConfig),
    *("user_dir", "results_path"),
}


def load_checkpoint_to_cpu(path: str, arg_overrides: Any = None, load_on_all_ranks: bool = False) -> dict[str, Any]:
    """The checkpoint at *path*; nothing in it is run.

    ``args`` is a namespace, changed by *arg_overrides*, and ``cfg`` the same in fairseq's groups.

    Raises:
        UserError: it cannot be read.
    """
    state = checkpoint.load(path)
    args = argparse.Namespace(**{**state["args"], **parse_dict("arg_overrides", arg_overrides or {})})
    return {**state, "args": args, "cfg": convert_namespace_to_omegaconf(args)}


def load_model_ensemble_and_task(
    filenames: Sequence[str],
    arg_overrides: Mapping[str, Any] | None = None,
    task: FairseqTask | None = None,
    strict: bool = True,
    suffix: str = "",
    num_shards: int = 1,
    state: object = None,
) -> tuple[list[BaseFairseqModel], DictConfig, FairseqTask]:
    """The models of several checkpoints in evaluation mode, as fairseq's are called,
    the settings of the first in groups, and their task.

    ``data`` among *arg_overrides* is the data folder (default: *task*'s, or the training's).

    Parameters must be those of the model, with and without *strict*.

    Raises:
        UserError: a checkpoint or the data cannot be used; there are parts of a checkpoint, or a
            *state* in place of a file.
    """
    if suffix or num_shards > 1 or state is not None:
        raise UserError("load_model_ensemble: `suffix`, `num_shards` and `state` are not implemented; give whole files")
    overrides = dict(arg_overrides or {})
    data = overrides.pop("data", None)
    if data is None:
        state = checkpoint.load(filenames[0], only="model")
        data = task.settings.data_path if task is not None else state["args"].get("data", "")
    of_command = {name: overrides.pop(name) for name in list(overrides) if name in OF_COMMANDS}
    models, setup, settings = load_models(list(filenames), data, overrides, of_command)
    return list(map(logits_model, models)), convert_namespace_to_omegaconf(namespace_of(settings)), setup


def load_model_ensemble(
    filenames: Sequence[str],
    arg_overrides: Mapping[str, object] | None = None,
    task: FairseqTask | None = None,
    *others: Any,
    **options: Any,
) -> tuple[list[BaseFairseqModel], DictConfig]:
    """The first two of :func:`load_model_ensemble_and_task`."""
    return load_model_ensemble_and_task(filenames, arg_overrides, task, *others, **options)[:2]


def load_pretrained_component_from_model(component: nn.Module, checkpoint: str, strict: bool = True) -> nn.Module:
    """*component*, a model's encoder or decoder, with its parameters from the checkpoint
    *checkpoint*."""
    part = "decoder." if isinstance(component, FairseqDecoder) else "encoder."
    state = {k[len(part) :]: v for k, v in load_checkpoint_to_cpu(checkpoint)["model"].items() if k.startswith(part)}
    component.load_state_dict(state, strict=strict)
    return component


def prune_state_dict(state_dict: dict[str, Any], model_cfg: object) -> dict[str, Any]:
    """*state_dict* as it is: layers are not left out of a model."""
    return state_dict


def checkpoint_paths(path: str, pattern: str = r"checkpoint(\d+)\.pt") -> list[str]:
    """The checkpoints in the folder *path* whose names match *pattern*, the highest number
    first."""
    matches = [(match, file) for file in sorted(Path(path).iterdir()) if (match := re.fullmatch(pattern, file.name))]
    numbered = [(float(match[1]) if match.groups() else 0.0, str(file)) for match, file in matches]
    return [file for _, file in sorted(numbered, reverse=True)]


def average_checkpoints(inputs: Sequence[str]) -> dict[str, object]:
    """The first of *inputs*, files with a ``model``, with the mean of all their tensors.

    Sums are in the tensors' own type, of float16 in float32; means of whole numbers are rounded
    down.

    Raises:
        UserError: a file cannot be read, or has other tensors than the first.
    """
    first = checkpoint.read(inputs[0], only="model")
    sums = {name: _summed(value) for name, value in first["model"].items()}
    for path in inputs[1:]:
        model = checkpoint.read(path, only="model")["model"]
        if model.keys() != sums.keys():
            raise UserError(f"{path}: has other parameters than {inputs[0]}; give checkpoints of one run")
        for name, value in model.items():
            sums[name] += _summed(value)
    count = len(inputs)
    means = {name: value / count if value.is_floating_point() else value // count for name, value in sums.items()}
    return _as_stored({**first, "model": means})


def _as_stored(value: object) -> Any:
    """*value* with the namespaces that were read as dicts as namespaces again, which can be
    saved."""
    if not isinstance(value, dict):
        return value
    changed = {name: _as_stored(part) for name, part in value.items()}
    return argparse.Namespace(**changed) if isinstance(value, Attributes) else changed


def _summed(value: Tensor) -> Tensor:
    return value.float() if value.dtype == torch.float16 else value.clone()
