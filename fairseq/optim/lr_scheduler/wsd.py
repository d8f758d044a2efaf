"""Warmup, stable rate, decay to zero."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fairseq.config.fields import flag, typed
from fairseq.config.registry import register_lr_scheduler
from fairseq.config.settings import RateConfig
from fairseq.errors import SettingError
from fairseq.optim.fairseq_optimizer import FairseqOptimizer
from fairseq.optim.lr_scheduler.fairseq_lr_scheduler import FairseqLRScheduler, single_rate

DECAY_SHARE = 0.2
"""Share of the updates in which the rate decays, unless the user says: the share that Hägele et al. recommend."""


@dataclass(frozen=True)
class WSDConfig(RateConfig):
    """Warmup-stable-decay schedule."""

    warmup_updates: int = flag(0, "warmup updates until `lr`", low=0)
    total_num_update: int | None = flag(None, "updates until the rate is 0 (default: `max_update`)", low=1)
    decay_updates: int | None = flag(None, "updates of the final decay (default: 20% of all)", low=0)
    decay_shape: str = flag("1-sqrt", "form of the final decay to 0", choices=("1-sqrt", "linear"))

    @property
    def total(self) -> int:
        """Updates of training.

        Raises:
            SettingError: their number is left open.
        """
        if (total := self.total_num_update or self.max_update) <= 0:
            raise SettingError(
                "`lr_scheduler` wsd: decays over the last updates; give `max_update` or `total_num_update`"
            )
        return total

    @property
    def decay(self) -> int:
        """Updates of the final decay."""
        return int(self.total * DECAY_SHARE) if self.decay_updates is None else self.decay_updates

    def check(self) -> None:
        single_rate(self, "wsd")
        known = self.total_num_update or self.max_update
        if known and self.warmup_updates > self.total - self.decay:
            raise SettingError(
                f"`warmup_updates` {self.warmup_updates}: warmup and the decay's {self.decay} updates exceed the "
                f"{self.total} updates of training; lower it or `decay_updates`"
            )


@register_lr_scheduler("wsd", dataclass=WSDConfig)
class WSDSchedule(FairseqLRScheduler):
    """A linear warmup to ``--lr``, a constant rate, and a decay to 0 over the last updates.

    With s the share of the decay that is over, the rate is lr · (1 − √s) or lr · (1 − s). The first update has the rate
    lr / warmup, the last one a rate above 0: no update is spent at rate 0.

    Source: Hu et al. 2024, "MiniCPM", section 4; Hägele et al. 2024, "Scaling laws and compute-optimal training beyond
    fixed training durations", section 3, for the form of the decay and its length.
    """

    def __init__(self, args: WSDConfig, optimizer: FairseqOptimizer) -> None:
        super().__init__(args, optimizer)
        self.config = config = typed(WSDConfig, args)
        self.lr = config.lr[0]
        self.decay, self.decay_start = config.decay, config.total - config.decay
        self.step_update(0)

    def step_update(self, num_updates: int) -> float:
        lr = self.lr
        if num_updates < self.config.warmup_updates:
            # + 1: no update is spent at rate 0.
            lr *= (num_updates + 1) / self.config.warmup_updates
        elif num_updates > self.decay_start:
            share = min((num_updates - self.decay_start) / self.decay, 1.0) if self.decay else 1.0
            lr *= 1 - (math.sqrt(share) if self.config.decay_shape == "1-sqrt" else share)
        self.optimizer.set_lr(lr)
        return lr
