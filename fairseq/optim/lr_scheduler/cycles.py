"""Schedules that rise and fall again and again, each with its settings."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fairseq.config.fields import flag
from fairseq.config.registry import register_lr_scheduler
from fairseq.config.settings import RateConfig
from fairseq.errors import SettingError
from fairseq.optim.lr_scheduler.fairseq_lr_scheduler import Schedule, WarmupConfig, single_rate, warmed_up

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CosineConfig(WarmupConfig):
    """Cosine annealing with warm restarts. With ``--max-lr`` as in fairseq 0.9, without it as in 0.10."""

    max_lr: float | None = flag(None, "maximum; `lr` is then the minimum (default: `lr`, from `min_lr`)", above=0)
    warmup_updates: int = flag(0, "warmup updates until the maximum", low=0)
    warmup_init_lr: float = flag(-1.0, "initial rate of the warmup (default: the minimum)")
    t_mult: float = flag(1.0, "length ratio of successive periods", low=1)
    lr_period_updates: float = flag(-1.0, "updates of the first period (default: `max_update` minus warmup)")
    lr_shrink: float = flag(0.1, "learning-rate ratio of successive periods", above=0)

    @property
    def rates(self) -> tuple[float, float]:
        """The minimum and the maximum: ``lr`` and ``max_lr`` where the latter is given, else ``min_lr`` and ``lr``."""
        lr, max_lr = single_rate(self, "cosine"), self.max_lr
        if max_lr is not None:
            if max_lr <= lr:
                raise SettingError(
                    f"`max_lr` {max_lr}: must be greater than `lr` {lr}, the cosine's minimum; change one"
                )
            return lr, max_lr
        lowest = max(self.min_lr, 0.0)
        if lowest >= lr:
            raise SettingError(f"`min_lr` {lowest}: must be less than `lr` {lr}, the cosine's maximum; change one")
        return lowest, lr

    @property
    def period(self) -> float:
        """Updates of the first period; SettingError if it is left open, as is the length of training."""
        period = self.lr_period_updates if self.lr_period_updates > 0 else float(self.max_update - self.warmup)
        if period <= 0:
            raise SettingError(
                "`lr_period_updates`: needed by `lr_scheduler` cosine unless `max_update` is greater than "
                f"{self.warmup_as_set}; give one of them"
            )
        return period

    @property
    def needs_max_update(self) -> bool:
        return super().needs_max_update or (self.max_update <= 0 and self.lr_period_updates <= 0)

    def check(self) -> None:
        highest = self.rates[1]
        if self.warmup_init_lr > highest:
            raise SettingError(
                f"`warmup_init_lr` {self.warmup_init_lr}: must not be greater than "
                f"{'`lr`' if self.max_lr is None else '`max_lr`'} {highest}; change one"
            )


@register_lr_scheduler("cosine", dataclass=CosineConfig)
class CosineSchedule(Schedule):
    """A linear warmup, then half cosines from a maximum to a minimum, each longer and lower than the one before.

    In period i, t updates after its start: m + ½·(M − m)·(1 + cos(π·t / T_i)) with T_i = period · t_mult^i,
    m = minimum · shrink^i and M = maximum · shrink^i.

    Source: Loshchilov & Hutter 2017, "SGDR: stochastic gradient descent with warm restarts", eq. 5.
    """

    config: CosineConfig

    def rate(self, updates: int) -> float:
        config, (low, high), period = self.config, self.config.rates, self.config.period
        if updates < config.warmup:
            initial = config.warmup_init_lr if config.warmup_init_lr >= 0 else low
            return warmed_up(updates, config.warmup, initial, high)
        since, index = float(updates - config.warmup), 0
        # Equal periods need no loop over all that have passed.
        if config.t_mult == 1:
            index = int(since // period)
            since -= index * period
        # Longer periods are few: with a factor of 2, a million updates are twenty.
        while since >= period:
            since -= period
            period *= config.t_mult
            index += 1
        low, high = low * config.lr_shrink**index, high * config.lr_shrink**index
        return low + 0.5 * (high - low) * (1 + math.cos(math.pi * since / period))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "period": self.config.period}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        period = self.config.period
        before = state.get("period", period)
        if before != period:
            logger.info(
                "`max_update`: the cosine's period is %g updates now and was %g; `lr_period_updates` %g keeps it",
                period, before, before,
            )  # fmt: skip

    @property
    def stop_lr(self) -> float:
        if self.config.max_lr is not None:
            return super().stop_lr
        stop = self.config.stop_min_lr  # --min-lr is the cosine's minimum here
        return -1.0 if stop is None else stop


@dataclass(frozen=True)
class TriangularConfig(RateConfig):
    """Triangular schedule."""

    max_lr: float | None = flag(None, "maximum learning rate, greater than `lr`", above=0)
    lr_period_updates: float = flag(5000.0, "updates per cycle", low=2)
    lr_shrink: float = flag(0.1, "factor of the maximum after each cycle", above=0)
    shrink_min: bool = flag(False, "apply `lr_shrink` to the minimum, too")

    @property
    def highest(self) -> float:
        """The maximum; SettingError if it is missing or not greater than the minimum."""
        lr = single_rate(self, "triangular")
        if self.max_lr is None or self.max_lr <= lr:
            raise SettingError(f"`max_lr` {self.max_lr}: must be greater than `lr` {lr}, the minimum; change one")
        return self.max_lr

    def check(self) -> None:
        single_rate(self, "triangular")
        if self.max_lr is not None:
            _ = self.highest


@register_lr_scheduler("triangular", dataclass=TriangularConfig)
class TriangularSchedule(Schedule):
    """From ``--lr`` to ``--max-lr`` in half a period and back in the other, the maximum shrinking by the period.

    Source: Smith 2017, "Cyclical learning rates for training neural networks", section 3.1.
    """

    config: TriangularConfig

    def rate(self, updates: int) -> float:
        # Whole updates, as in fairseq: an odd period is one update shorter.
        half = self.config.lr_period_updates // 2
        cycle = updates // (2 * half)
        shrink = self.config.lr_shrink**cycle
        low = self.lr * (shrink if self.config.shrink_min else 1.0)
        # Smith's x = |n / half − 2 · cycle + 1| with cycles counted from 1: 1 − x is 0 at the ends and 1 in the middle.
        height = max(0.0, 1 - abs(updates / half - 2 * (cycle + 1) + 1))
        return low + (self.config.highest * shrink - low) * height
