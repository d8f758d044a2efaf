"""Schedules that rise and fall again and again, each with its settings."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from fairseq.optim.lr_scheduler.fairseq_lr_scheduler import Schedule, warmed_up
from fairseq.optim.lr_scheduler.settings import CosineConfig, TriangularConfig

logger = logging.getLogger(__name__)


class CosineSchedule(Schedule):
    """A linear warmup, then half cosines from a maximum to a minimum, each longer and lower than
    the one before.

    In period i, t updates after its start: m + ½·(M − m)·(1 + cos(π·t / T_i)) with T_i = period ·
    t_mult^i, m = minimum · shrink^i and M = maximum · shrink^i.

    Source: Loshchilov & Hutter 2017, "SGDR: stochastic gradient descent with warm restarts", eq. 5.
    """

    config_class = CosineConfig
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

    def load_state_dict(self, state: Mapping[str, object]) -> None:
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


class TriangularSchedule(Schedule):
    """From ``--lr`` to ``--max-lr`` in half a period and back in the other, the maximum shrinking
    by the period.

    Source: Smith 2017, "Cyclical learning rates for training neural networks", section 3.1.
    """

    config_class = TriangularConfig
    config: TriangularConfig

    def rate(self, updates: int) -> float:
        # Whole updates, as in fairseq: an odd period is one update shorter.
        half = self.config.lr_period_updates // 2
        cycle = updates // (2 * half)
        shrink = self.config.lr_shrink**cycle
        low = self.lr * (shrink if self.config.shrink_min else 1.0)
        # Smith's x = |n / half − 2 · cycle + 1| with cycles counted from 1: 1 − x is 0 at the ends
        # and 1 in the middle.
        height = max(0.0, 1 - abs(updates / half - 2 * (cycle + 1) + 1))
        return low + (self.config.highest * shrink - low) * height
