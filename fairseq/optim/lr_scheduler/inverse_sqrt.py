"""A rate that falls with the square root of the number of updates."""

from __future__ import annotations

from dataclasses import dataclass

from fairseq.config.fields import flag, typed
from fairseq.config.registry import register_lr_scheduler
from fairseq.config.settings import RateConfig
from fairseq.optim.fairseq_optimizer import FairseqOptimizer
from fairseq.optim.lr_scheduler.fairseq_lr_scheduler import FairseqLRScheduler, check_warmup


@dataclass(frozen=True)
class InverseSqrtConfig(RateConfig):
    """Inverse square root schedule."""

    warmup_updates: int = flag(4000, "warmup updates until `lr`", low=0)
    warmup_init_lr: float = flag(-1.0, "initial rate of the warmup (default: 0)")

    def check(self) -> None:
        check_warmup(self, "inverse_sqrt")


@register_lr_scheduler("inverse_sqrt", dataclass=InverseSqrtConfig)
class InverseSqrtSchedule(FairseqLRScheduler):
    """A linear warmup of w updates to ``--lr``, then lr · √(w / n) after n updates (w = 1 without a warmup).

    Source: Vaswani et al. 2017, "Attention is all you need", eq. 3.
    """

    def __init__(self, args: InverseSqrtConfig, optimizer: FairseqOptimizer) -> None:
        super().__init__(args, optimizer)
        self.config = typed(InverseSqrtConfig, args)
        self.lr = self.config.lr[0]
        self.init_lr = max(self.config.warmup_init_lr, 0.0)
        self.step_update(0)

    def step_update(self, num_updates: int) -> float:
        warmup = self.config.warmup_updates
        if num_updates < warmup:
            lr = self.init_lr + num_updates * (self.lr - self.init_lr) / warmup
        else:
            # Without a warmup the decay begins after the first update: 0 has no inverse.
            lr = self.lr * (max(warmup, 1) / max(num_updates, 1)) ** 0.5
        self.optimizer.set_lr(lr)
        return lr
