"""Warmup, constant rate, exponential decay."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fairseq.config.fields import flag, typed
from fairseq.config.registry import register_lr_scheduler
from fairseq.config.settings import RateConfig
from fairseq.errors import SettingError
from fairseq.optim.fairseq_optimizer import FairseqOptimizer
from fairseq.optim.lr_scheduler.fairseq_lr_scheduler import FairseqLRScheduler, single_rate


@dataclass(frozen=True)
class TriStageConfig(RateConfig):
    """Three-stage schedule."""

    warmup_steps: int = flag(4000, "warmup updates until `lr`", low=0)
    hold_steps: int = flag(20000, "updates at `lr` after the warmup", low=0)
    decay_steps: int = flag(60000, "updates of the exponential decay", low=0)
    phase_ratio: list[float] | None = flag(
        None, "fractions of `max_update` for the three stages, instead of their lengths", low=0, high=1, metavar="W,H,D"
    )
    init_lr_scale: float = flag(0.01, "initial rate as a fraction of `lr`", above=0)
    final_lr_scale: float = flag(0.01, "final rate as a fraction of `lr`", above=0)

    def check(self) -> None:
        single_rate(self, "tri_stage")
        if self.phase_ratio is None:
            return
        text = ",".join(map(str, self.phase_ratio))
        if len(self.phase_ratio) != 3 or not math.isclose(sum(self.phase_ratio), 1, abs_tol=1e-6):
            raise SettingError(f"`phase_ratio` {text}: expected three numbers that sum to 1")


@register_lr_scheduler("tri_stage", dataclass=TriStageConfig)
class TriStageSchedule(FairseqLRScheduler):
    """A linear warmup to ``--lr``, a constant rate, and an exponential decay to ``--lr`` · ``--final-lr-scale``.

    Source: Park et al. 2019, "SpecAugment", section 3.2.
    """

    def __init__(self, args: TriStageConfig, optimizer: FairseqOptimizer) -> None:
        super().__init__(args, optimizer)
        self.config = config = typed(TriStageConfig, args)
        self.lr = config.lr[0]
        self.steps = [config.warmup_steps, config.hold_steps, config.decay_steps]
        if config.phase_ratio is not None:
            # Not in check(): with --stages the length of training comes with the stage.
            if config.max_update <= 0:
                text = ",".join(map(str, config.phase_ratio))
                raise SettingError(f"`phase_ratio` {text}: needs `max_update`; give it")
            self.steps = [int(config.max_update * share) for share in config.phase_ratio]
        self.step_update(0)

    def step_update(self, num_updates: int) -> float:
        warmup, hold, decay = self.steps
        if num_updates < warmup:
            initial = self.config.init_lr_scale
            lr = self.lr * (initial + (1 - initial) * num_updates / warmup)
        elif num_updates < warmup + hold:
            lr = self.lr
        else:
            share = min((num_updates - warmup - hold) / decay, 1.0) if decay else 1.0
            lr = self.lr * self.config.final_lr_scale**share
        self.optimizer.set_lr(lr)
        return lr
