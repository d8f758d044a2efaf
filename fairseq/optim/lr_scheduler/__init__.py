"""Learning-rate schedules."""

from __future__ import annotations

from fairseq.config.registry import LR_SCHEDULERS, register_lr_scheduler
from fairseq.optim.lr_scheduler import cycles, decays
from fairseq.optim.lr_scheduler.fairseq_lr_scheduler import FairseqLRScheduler, build_lr_scheduler

__all__ = ["LR_SCHEDULERS", "FairseqLRScheduler", "build_lr_scheduler", "cycles", "decays", "register_lr_scheduler"]
