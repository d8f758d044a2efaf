"""Learning-rate schedules."""

from __future__ import annotations

from fairseq.config.registry import LR_SCHEDULERS, register_lr_scheduler
from fairseq.optim.lr_scheduler import (
    cosine,
    fixed,
    inverse_sqrt,
    polynomial_decay,
    reduce_lr_on_plateau,
    tri_stage,
    triangular,
    wsd,
)
from fairseq.optim.lr_scheduler.fairseq_lr_scheduler import FairseqLRScheduler, build_lr_scheduler

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
    "wsd",
]
