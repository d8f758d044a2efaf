"""A rate that falls to its end along a power of what is left of training."""

from __future__ import annotations

from dataclasses import dataclass

from fairseq.config.fields import flag, typed
from fairseq.config.registry import register_lr_scheduler
from fairseq.config.settings import RateConfig
from fairseq.errors import SettingError
from fairseq.optim.fairseq_optimizer import FairseqOptimizer
from fairseq.optim.lr_scheduler.fairseq_lr_scheduler import FairseqLRScheduler, rate_of_epoch


@dataclass(frozen=True)
class PolynomialDecayConfig(RateConfig):
    """Polynomial decay."""

    force_anneal: int | None = flag(None, "last epoch that follows a list of `lr`", aliases=("--fa",), low=1)
    warmup_updates: int = flag(0, "warmup updates until `lr`", low=0)
    end_learning_rate: float = flag(0.0, "final rate", low=0)
    power: float = flag(1.0, "exponent of the decay (1: linear)", above=0)
    total_num_update: int = flag(1000000, "updates until the final rate", low=1)

    def check(self) -> None:
        if self.total_num_update <= self.warmup_updates:
            raise SettingError(
                f"`total_num_update` {self.total_num_update}: must be greater than "
                f"`warmup_updates` {self.warmup_updates}; change one"
            )
        if self.end_learning_rate > min(self.lr):
            raise SettingError(
                f"`end_learning_rate` {self.end_learning_rate}: must not be greater than "
                f"`lr` {min(self.lr)}; change one"
            )


@register_lr_scheduler("polynomial_decay", dataclass=PolynomialDecayConfig)
class PolynomialDecaySchedule(FairseqLRScheduler):
    """A linear warmup from 0, then end + (lr − end) · (share of the updates that are left)^power."""

    def __init__(self, args: PolynomialDecayConfig, optimizer: FairseqOptimizer) -> None:
        super().__init__(args, optimizer)
        self.config = typed(PolynomialDecayConfig, args)
        self.rates = self.config.lr
        self.lr = self.rates[0]
        self.num_updates = 0
        self.step_update(0)

    def step_begin_epoch(self, epoch: int) -> float:
        # From that epoch on the list stands still; the decay goes on.
        self.lr = rate_of_epoch(self.rates, min(epoch, self.config.force_anneal or epoch))
        return self.step_update(self.num_updates)

    def step_update(self, num_updates: int) -> float:
        self.num_updates = num_updates
        warmup, end = self.config.warmup_updates, self.config.end_learning_rate
        if num_updates < warmup:
            lr = self.lr * num_updates / warmup
        else:
            remaining = max(0.0, 1 - (num_updates - warmup) / (self.config.total_num_update - warmup))
            lr = end + (self.lr - end) * remaining**self.config.power
        self.optimizer.set_lr(lr)
        return lr
