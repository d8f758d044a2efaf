"""One rate for each epoch."""

from __future__ import annotations

from dataclasses import dataclass

from fairseq.config.fields import flag, typed
from fairseq.config.registry import register_lr_scheduler
from fairseq.config.settings import RateConfig
from fairseq.optim.fairseq_optimizer import FairseqOptimizer
from fairseq.optim.lr_scheduler.fairseq_lr_scheduler import FairseqLRScheduler, rate_of_epoch


@dataclass(frozen=True)
class FixedConfig(RateConfig):
    """Fixed learning rates."""

    force_anneal: int | None = flag(
        None, "first epoch in which the rate shrinks instead of following `lr`", aliases=("--fa",), low=1
    )
    lr_shrink: float = flag(0.1, "factor of the rate each epoch from `force_anneal` on", above=0)
    warmup_updates: int = flag(0, "warmup updates until `lr`", low=0)


@register_lr_scheduler("fixed", dataclass=FixedConfig)
class FixedSchedule(FairseqLRScheduler):
    """The rate that ``--lr`` lists for the epoch; in the warmup of w updates, (n + 1) / w of it after n updates."""

    def __init__(self, args: FixedConfig, optimizer: FairseqOptimizer) -> None:
        super().__init__(args, optimizer)
        self.config = typed(FixedConfig, args)
        self.rates = self.config.lr
        self.lr = self.rates[0]
        self.num_updates = 0
        self.step_begin_epoch(1)

    def step_begin_epoch(self, epoch: int) -> float:
        anneal = self.config.force_anneal
        if anneal is None or epoch < anneal:
            self.lr = rate_of_epoch(self.rates, epoch)
        else:
            # From the last rate of the list, shrunk already in the first of these epochs.
            self.lr = self.rates[-1] * self.config.lr_shrink ** (epoch + 1 - anneal)
        return self.step_update(self.num_updates)

    def step_update(self, num_updates: int) -> float:
        self.num_updates = num_updates
        # fairseq's warmup of this schedule begins at 1 / w; the others begin at their initial rate.
        lr = self.lr * min(1.0, (num_updates + 1) / max(self.config.warmup_updates, 1))
        self.optimizer.set_lr(lr)
        return lr
