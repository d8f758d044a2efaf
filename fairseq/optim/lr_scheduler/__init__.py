"""Learning-rate schedules by name, and :func:`build_lr_scheduler`."""

from __future__ import annotations

import argparse

from fairseq.optim.fairseq_optimizer import FairseqOptimizer
from fairseq.optim.lr_scheduler import (
    cosine,
    fixed,
    inverse_sqrt,
    polynomial_decay,
    reduce_lr_on_plateau,
    tri_stage,
    triangular,
)
from fairseq.optim.lr_scheduler.fairseq_lr_scheduler import LR_SCHEDULERS, FairseqLRScheduler, register_lr_scheduler
from fairseq.settings import TrainingSettings, chosen_part

__all__ = [
    "LR_SCHEDULERS",
    "FairseqLRScheduler",
    "build_lr_scheduler",
    "cosine",
    "fixed",
    "inverse_sqrt",
    "polynomial_decay",
    "reduce_lr_on_plateau",
    "register_lr_scheduler",
    "tri_stage",
    "triangular",
]


def build_lr_scheduler(
    settings: TrainingSettings | argparse.Namespace, optimizer: FairseqOptimizer
) -> FairseqLRScheduler:
    """The schedule that *settings* choose; it has given *optimizer* the first update's rate.

    Raises:
        UserError: no schedule has that name, or its settings are wrong or contradict each other.
    """
    cls, given = chosen_part(LR_SCHEDULERS, "lr_scheduler", settings)
    return cls(given, optimizer)
