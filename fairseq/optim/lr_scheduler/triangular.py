"""A rate that rises and falls linearly, again and again."""

from __future__ import annotations

from dataclasses import dataclass

from fairseq.config.fields import flag, typed
from fairseq.config.registry import register_lr_scheduler
from fairseq.config.settings import RateConfig
from fairseq.errors import UserError
from fairseq.optim.fairseq_optimizer import FairseqOptimizer
from fairseq.optim.lr_scheduler.fairseq_lr_scheduler import FairseqLRScheduler, single_rate


@dataclass(frozen=True)
class TriangularConfig(RateConfig):
    """Triangular schedule."""

    max_lr: float | None = flag(None, "maximum learning rate, greater than --lr", above=0)
    lr_period_updates: float = flag(5000.0, "updates per cycle", low=2)
    lr_shrink: float = flag(0.1, "factor of the maximum after each cycle", above=0)
    shrink_min: bool = flag(False, "apply --lr-shrink to the minimum, too")


@register_lr_scheduler("triangular", dataclass=TriangularConfig)
class TriangularSchedule(FairseqLRScheduler):
    """From ``--lr`` to ``--max-lr`` in half a period and back in the other, the maximum shrinking by the period.

    Source: Smith 2017, "Cyclical learning rates for training neural networks", section 3.1.

    Raises:
        UserError: ``--max-lr`` is missing or not greater than ``--lr``.
    """

    def __init__(self, args: TriangularConfig, optimizer: FairseqOptimizer) -> None:
        super().__init__(args, optimizer)
        self.config = config = typed(TriangularConfig, args)
        self.lr = single_rate(config, "triangular")
        if config.max_lr is None or config.max_lr <= self.lr:
            raise UserError(f"--max-lr {config.max_lr}: must be greater than --lr {self.lr}, the minimum; change one")
        self.max_lr = config.max_lr
        self.step_update(0)

    def step_update(self, num_updates: int) -> float:
        half = self.config.lr_period_updates // 2
        cycle = num_updates // (2 * half)
        shrink = self.config.lr_shrink**cycle
        low = self.lr * (shrink if self.config.shrink_min else 1.0)
        height = max(0.0, 1 - abs(num_updates / half - 2 * (cycle + 1) + 1))
        lr = low + (self.max_lr * shrink - low) * height
        self.optimizer.set_lr(lr)
        return lr
