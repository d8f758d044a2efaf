"""Base classes, architectures and small parts that plug-ins import from models, optimizers and
tasks of fairseq."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fairseq.config.registry import ARCHITECTURES, completed
from fairseq.criterions.fairseq_criterion import FairseqCriterion
from fairseq.logging import progress
from fairseq.models import loading
from fairseq.models.architectures.transformer_lm import BASE
from fairseq.models.base import BaseFairseqModel
from fairseq.optim.fairseq_optimizer import FairseqOptimizer


class LegacyFairseqCriterion(FairseqCriterion):
    """A criterion that is given the namespace and the task, as in fairseq before 0.10."""

    def __init__(self, args: object, task: object) -> None:
        super().__init__(args, task)


# Copied training steps test `isinstance(optimizer, AMPOptimizer)`: without the name the import
# would fail.
class AMPOptimizer(FairseqOptimizer):
    """The name that copied training steps compare an optimizer with; none is one: autocast needs
    none here."""


def build_model(cfg: Any, task: Any, from_checkpoint: bool = False) -> BaseFairseqModel:
    """The model that the settings *cfg* choose, for the dictionary of *task*."""
    return loading.build_model(cfg, task)


def progress_bar(
    iterator: Any,
    log_format: str | None = None,
    log_interval: int = 100,
    log_file: str | None = None,
    epoch: int | None = None,
    prefix: str | None = None,
    tensorboard_logdir: str | None = None,
    default_log_format: str = "tqdm",
    **recorders: object,
) -> progress.ProgressBar[Any]:
    """*iterator* as a progress bar of a script's own loop, which writes no files."""
    options: dict[str, Any] = {"log_interval": log_interval, "epoch": epoch, "prefix": prefix}
    return progress.progress_bar(iterator, log_format=log_format, default=default_log_format, **options)


def build_progress_bar(
    args: object,
    iterator: object,
    epoch: int | None = None,
    prefix: str | None = None,
    default: str = "tqdm",
    no_progress_bar: str = "none",
) -> progress.ProgressBar[Any]:
    """:func:`progress_bar` with the settings *args*."""
    settings = {"log_format": None, "log_interval": 100, **vars(args)}
    default = no_progress_bar if settings.get("no_progress_bar") else default
    return progress_bar(
        iterator, settings["log_format"], settings["log_interval"], None, epoch, prefix, default_log_format=default
    )


def get_fused_adam_class() -> None:
    """Return None, at which a plug-in takes its own Adam: apex's is chosen by
    :mod:`fairseq.optim.adam`."""


def base_lm_architecture(args: object) -> None:
    """Set on *args* what all architectures of fairseq but ``transformer_lm`` begin with."""
    vars(args).update(completed(BASE, vars(args)))


def __getattr__(name: str) -> Callable[[Any], None]:
    """The function that sets the defaults of an architecture on a namespace, for plug-ins to call
    in their own."""
    architecture = name.removesuffix("_architecture")
    if architecture not in ARCHITECTURES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return ARCHITECTURES[architecture].fill
