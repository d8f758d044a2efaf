"""A rate that rises and falls linearly, again and again."""

from __future__ import annotations

from dataclasses import dataclass

from fairseq.config.fields import flag, typed
from fairseq.config.registry import register_lr_scheduler
from fairseq.config.settings import RateConfig
from fairseq.errors import SettingError
from fairseq.optim.fairseq_optimizer import FairseqOptimizer
from fairseq.optim.lr_scheduler.fairseq_lr_scheduler import FairseqLRScheduler, single_rate


@dataclass(frozen=True)
class TriangularConfig(RateConfig):
    """Triangular schedule."""

    max_lr: float | None = flag(None, "maximum learning rate, greater than `lr`", above=0)
    lr_period_updates: float = flag(5000.0, "updates per cycle", low=2)
    lr_shrink: float = flag(0.1, "factor of the maximum after each cycle", above=0)
    shrink_min: bool = flag(False, "apply `lr_shrink` to the minimum, too")

    @property
    def rates(self) -> tuple[float, float]:
        """The minimum and the maximum.

        Raises:
            SettingError: the maximum is missing or not greater.
        """
        lr = single_rate(self, "triangular")
        if self.max_lr is None or self.max_lr <= lr:
            raise SettingError(f"`max_lr` {self.max_lr}: must be greater than `lr` {lr}, the minimum; change one")
        return lr, self.max_lr

    def check(self) -> None:
        single_rate(self, "triangular")
        if self.max_lr is not None:
            _ = self.rates


@register_lr_scheduler("triangular", dataclass=TriangularConfig)
class TriangularSchedule(FairseqLRScheduler):
    """From ``--lr`` to ``--max-lr`` in half a period and back in the other, the maximum shrinking by the period.

    Source: Smith 2017, "Cyclical learning rates for training neural networks", section 3.1.
    """

    def __init__(self, args: TriangularConfig, optimizer: FairseqOptimizer) -> None:
        super().__init__(args, optimizer)
        self.config = config = typed(TriangularConfig, args)
        self.lr, self.max_lr = config.rates
        self.step_update(0)

    def step_update(self, num_updates: int) -> float:
        # Whole updates, as in fairseq: an odd period is one update shorter.
        half = self.config.lr_period_updates // 2
        cycle = num_updates // (2 * half)
        shrink = self.config.lr_shrink**cycle
        low = self.lr * (shrink if self.config.shrink_min else 1.0)
        # Smith's x = |n / half − 2 · cycle + 1| with cycles counted from 1: 1 − x is 0 at the ends and 1 in the middle.
        height = max(0.0, 1 - abs(num_updates / half - 2 * (cycle + 1) + 1))
        lr = low + (self.max_lr * shrink - low) * height
        self.optimizer.set_lr(lr)
        return lr
