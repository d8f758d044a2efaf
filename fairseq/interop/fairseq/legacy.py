"""Base classes whose constructors take the flat namespace, as in fairseq before 0.10."""

from __future__ import annotations

from typing import Any

from fairseq.criterions.fairseq_criterion import FairseqCriterion
from fairseq.optim.fairseq_optimizer import FairseqOptimizer
from fairseq.optim.lr_scheduler.fairseq_lr_scheduler import FairseqLRScheduler
from fairseq.tasks.fairseq_task import FairseqTask

LegacyFairseqLRScheduler = FairseqLRScheduler
LegacyFairseqOptimizer = FairseqOptimizer
LegacyFairseqTask = FairseqTask


class LegacyFairseqCriterion(FairseqCriterion):
    """A criterion that is given the namespace and the task."""

    def __init__(self, args: Any, task: Any) -> None:
        super().__init__(args, task)
