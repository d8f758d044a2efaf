"""Schedules that rise once and fall, each with its settings:
rates as functions of the number of updates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fairseq.optim.lr_scheduler.fairseq_lr_scheduler import (
    Schedule,
    rate_of_epoch,
    warmed_up,
)
from fairseq.optim.lr_scheduler.settings import (
    FixedConfig,
    InverseSqrtConfig,
    PolynomialDecayConfig,
    ReduceLROnPlateauConfig,
    TriStageConfig,
    WSDConfig,
)


class FixedSchedule(Schedule):
    """The rate that ``--lr`` lists for the epoch; in the warmup of w updates, (n + 1) / w of it
    after n updates."""

    config_class = FixedConfig
    config: FixedConfig

    def step_begin_epoch(self, epoch: int) -> float:
        rates, anneal = self.config.lr, self.config.force_anneal
        if anneal is None or epoch < anneal:
            self.lr = rate_of_epoch(rates, epoch)
        else:
            # From the last rate of the list, shrunk already in the first of these epochs.
            self.lr = rates[-1] * self.config.lr_shrink ** (epoch + 1 - anneal)
        return super().step_begin_epoch(epoch)

    def rate(self, updates: int) -> float:
        # fairseq's warmup of this schedule begins at 1 / w; the others begin at their initial rate.
        return self.lr * min(1.0, (updates + 1) / max(self.config.warmup, 1))


class InverseSqrtSchedule(Schedule):
    """A linear warmup of w updates to ``--lr``,
    then lr · √(w / n) after n updates (w = 1 without a warmup).

    Source: Vaswani et al. 2017, "Attention is all you need", eq. 3.
    """

    config_class = InverseSqrtConfig
    config: InverseSqrtConfig

    def rate(self, updates: int) -> float:
        warmup = self.config.warmup
        if updates < warmup:
            return warmed_up(updates, warmup, max(self.config.warmup_init_lr, 0.0), self.lr)
        # Without a warmup the decay begins after the first update: 0 has no inverse.
        return self.lr * (max(warmup, 1) / max(updates, 1)) ** 0.5


class PolynomialDecaySchedule(Schedule):
    """A linear warmup from 0, then end + (lr − end)
    · (share of the updates that are left)^power."""

    config_class = PolynomialDecayConfig
    config: PolynomialDecayConfig

    def step_begin_epoch(self, epoch: int) -> float:
        # From that epoch on the list stands still; the decay goes on.
        self.lr = rate_of_epoch(self.config.lr, min(epoch, self.config.force_anneal or epoch))
        return super().step_begin_epoch(epoch)

    def rate(self, updates: int) -> float:
        warmup, end = self.config.warmup, self.config.end_learning_rate
        if updates < warmup:
            return warmed_up(updates, warmup, 0.0, self.lr)
        remaining = max(0.0, 1 - (updates - warmup) / (self.config.total - warmup))
        return end + (self.lr - end) * remaining**self.config.power


class TriStageSchedule(Schedule):
    """A linear warmup to ``--lr``, a constant rate,
    and an exponential decay to ``--lr`` · ``--final-lr-scale``.

    Source: Park et al. 2019, "SpecAugment", section 3.2.
    """

    config_class = TriStageConfig
    config: TriStageConfig

    def rate(self, updates: int) -> float:
        warmup, hold, decay = self.config.stages
        if updates < warmup:
            initial = self.config.init_lr_scale
            return self.lr * (initial + (1 - initial) * updates / warmup)
        if updates < warmup + hold:
            return self.lr
        share = min((updates - warmup - hold) / decay, 1.0) if decay else 1.0
        return self.lr * self.config.final_lr_scale**share


class WSDSchedule(Schedule):
    """A linear warmup to ``--lr``, a constant rate, and a decay to 0 over the last updates.

    With s the share of the decay that is over, the rate is lr · (1 − √s) or lr · (1 − s). The first
    update has the rate lr / warmup, the last one a rate above 0: no update is spent at rate 0.

    Source: Hu et al. 2024, "MiniCPM", section 4; Hägele et al. 2024, "Scaling laws and
    compute-optimal training beyond fixed training durations", section 3, for the form of the decay
    and its length.
    """

    config_class = WSDConfig
    config: WSDConfig

    def rate(self, updates: int) -> float:
        warmup, decay = self.config.warmup, self.config.decay
        start = self.config.total - decay
        if updates < warmup:
            # + 1: no update is spent at rate 0.
            return self.lr * ((updates + 1) / warmup)
        if updates <= start:
            return self.lr
        share = min((updates - start) / decay, 1.0) if decay else 1.0
        return self.lr * (1 - (math.sqrt(share) if self.config.decay_shape == "1-sqrt" else share))


class ReduceLROnPlateau(Schedule):
    """A linear warmup to ``--lr``, then ``--lr-shrink``
    times less after each plateau of the validation figure.

    A plateau is more than ``--lr-patience`` epochs in a row of which none is better than the best
    by the threshold.
    """

    config_class = ReduceLROnPlateauConfig
    config: ReduceLROnPlateauConfig
    restored_settings = ("lr",)
    bad_epochs = 0

    def rate(self, updates: int) -> float:
        warmup = self.config.warmup
        if updates < warmup:
            return warmed_up(updates, warmup, max(self.config.warmup_init_lr, 0.0), self.config.lr[0])
        return self.lr

    def step(self, epoch: int, val_loss: float | None = None) -> float:
        # The warmup raises the rate, whatever validations say.
        if val_loss is not None and self.num_updates >= self.config.warmup:
            if self._is_better(val_loss):
                self.best, self.bad_epochs = val_loss, 0
            else:
                self.bad_epochs += 1
            if self.bad_epochs > self.config.lr_patience:
                self.lr *= self.config.lr_shrink
                self.bad_epochs = 0
        return self.step_update(self.num_updates)

    def _is_better(self, figure: float) -> bool:
        if self.best is None:
            return not math.isnan(figure)
        # Relative to the best figure, as torch's threshold_mode="rel".
        margin = self.config.lr_threshold * self.best
        if self.config.maximize_best_checkpoint_metric:
            return figure > self.best + margin
        return figure < self.best - margin

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "lr": self.lr, "bad_epochs": self.bad_epochs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; fairseq's has no rate: the restored optimizer has it."""
        best = state.get("best")
        # fairseq stores torch's best value, which begins at infinity: every margin below it would
        # be infinite, too.
        self.best = float(best) if best is not None and math.isfinite(best) else None
        self.lr = float(state.get("lr", self.optimizer.get_lr()))
        self.bad_epochs = int(state.get("bad_epochs", 0))
