"""The mean of the parameters of several checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq.checkpoint.manager import AMONG_BEST, EPOCH, UPDATE, numbered
from fairseq.checkpoint.store import load
from fairseq.errors import UserError

PATTERNS = {"epoch": EPOCH, "update": UPDATE, "best": AMONG_BEST}
OF_ONE = "give checkpoints of one run"


def newest(
    folder: str | Path,
    kind: str,
    count: int,
    upper_bound: int | None = None,
    maximizes: Callable[[Path], bool] = lambda path: False,
) -> list[Path]:
    """The *count* newest checkpoints of a folder, or those with the best figures; UserError if
    there are fewer, or figures of several metrics.

    Args:
        kind: ``epoch``, ``update`` or ``best``.
        upper_bound: the highest epoch or update to take.
        maximizes: returns whether the largest figure
            is the best in the run that saved a checkpoint.
    """
    checkpoints = numbered(Path(folder), PATTERNS[kind]) if os.path.isdir(folder) else []
    fitting = [path for number, path in checkpoints if upper_bound is None or number <= upper_bound]
    if len(fitting) < count:
        raise UserError(f"`inputs` {folder}: {len(fitting)} {kind} checkpoints found, {count} are to be averaged")
    if kind == "best":
        metrics = sorted({path.name.removeprefix("checkpoint.best_").rpartition("_")[0] for path in fitting})
        if len(metrics) > 1:
            raise UserError(f"`inputs` {folder}: best checkpoints of several metrics, {', '.join(metrics)}; give files")
        return (fitting if maximizes(fitting[0]) else fitting[::-1])[:count]
    return fitting[:count]


def maximizes_metric(path: Path) -> bool:
    """Return whether the run that saved the checkpoint at *path* looked for the largest figure."""
    return bool(load(path, only="model")["args"].get("maximize_best_checkpoint_metric"))


def average(
    paths: Sequence[str | Path],
    digest: Callable[[Mapping[str, Any], str | Path], Any],
    decisive: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> dict[str, Any]:
    """The first checkpoint with the mean of all their
    parameters, and without the state of its training.

    Whole numbers, such as the counts of notes, are not averaged: the checkpoint with most updates
    gives them, wherever it stands. Sums are float64; checkpoints are read one at a time. One tensor
    under several names, such as tied embeddings, stays one.

    Args:
        digest: of the dictionary of a checkpoint and its file; None where it is not known.
        decisive: a checkpoint's settings that its parameters depend on beside their shapes.

    Raises:
        UserError: a checkpoint cannot be read, or is of another model or dictionary.
    """
    first: dict[str, Any] = {}
    owners: dict[str, str] = {}  # of each parameter's tensor in the first checkpoint: the first name that it has
    digests: dict[object, str | Path] = {}
    sums: dict[str, Tensor] = {}
    most = -1
    for path in paths:
        state = load(path, only="model")
        if not first:
            first, named = state, dict[object, str]()
            for name, value in state["model"].items():
                owners[name] = named.setdefault((value.data_ptr(), value.shape, value.stride(), value.dtype), name)
        # Equal shapes do not tell two dictionaries of one size apart.
        if (dictionary := digest(state, path)) is not None:
            digests.setdefault(dictionary, path)
        if len(digests) > 1:
            raise UserError(
                f"{path}: was trained with another dictionary than {next(iter(digests.values()))}; {OF_ONE}"
            )
        parameters = state["model"]
        if first is not state and _shapes(parameters) != _shapes(first["model"]):
            raise UserError(f"{path}: has other parameters than {paths[0]}; {OF_ONE}")
        _check_settings(decisive(state.get("args") or {}), decisive(first.get("args") or {}), path, paths[0])
        updates = int((state.get("optimizer_history") or [{}])[-1].get("num_updates") or 0)
        for name, value in parameters.items():
            if owners[name] != name:
                continue
            # float64: with many checkpoints, sums in their own
            # precision would lose what distinguishes them.
            if value.is_floating_point():
                sums[name] = sums[name] + value.double() if name in sums else value.double()
            elif updates > most:
                # A copy: not a part of the memory-mapped file.
                sums[name] = value.clone()
        most = max(most, updates)
    means = {
        name: (total / len(paths)).to(first["model"][name].dtype) if total.is_floating_point() else total
        for name, total in sums.items()
    }
    model = {name: means[owner] for name, owner in owners.items()}
    return {**first, "model": model, "optimizer_history": [], "last_optimizer_state": None, "extra_state": {}}


def _check_settings(
    settings: Mapping[str, object], first: Mapping[str, object], path: str | Path, first_path: str | Path
) -> None:
    """Raise UserError if a setting that both have differs."""
    for name, value in settings.items():
        if name in first and value != first[name]:
            raise UserError(
                f"{path}: was trained with `{name}` {value!s:.80}, and {first_path} with {first[name]!s:.80}; {OF_ONE}"
            )


def _shapes(parameters: dict[str, Tensor]) -> dict[str, tuple[torch.Size, bool]]:
    """Shape of each parameter, and whether it is averaged: whole numbers are not."""
    return {name: (value.shape, value.is_floating_point()) for name, value in parameters.items()}
