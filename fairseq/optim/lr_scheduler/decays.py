"""Schedules that rise once and fall, each with its settings: rates as functions of the number of updates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fairseq.config.fields import flag
from fairseq.config.registry import register_lr_scheduler
from fairseq.config.settings import RateConfig, whole_share
from fairseq.errors import SettingError
from fairseq.optim.lr_scheduler.fairseq_lr_scheduler import (
    Schedule,
    WarmupConfig,
    check_warmup,
    rate_of_epoch,
    single_rate,
    warmed_up,
)

DECAY_SHARE = 0.2
"""Share of the updates in which ``wsd`` decays, unless the user says: the share that Hägele et al. 2024 recommend."""


@dataclass(frozen=True)
class FixedConfig(WarmupConfig):
    """Fixed learning rates."""

    force_anneal: int | None = flag(
        None, "first epoch in which the rate shrinks instead of following `lr`", aliases=("--fa",), low=1
    )
    lr_shrink: float = flag(0.1, "factor of the rate each epoch from `force_anneal` on", above=0)


@register_lr_scheduler("fixed", dataclass=FixedConfig)
class FixedSchedule(Schedule):
    """The rate that ``--lr`` lists for the epoch; in the warmup of w updates, (n + 1) / w of it after n updates."""

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


@dataclass(frozen=True)
class InverseSqrtConfig(WarmupConfig):
    """Inverse square root schedule."""

    warmup_updates: int = flag(4000, "warmup updates until `lr`", low=0)
    warmup_init_lr: float = flag(-1.0, "initial rate of the warmup (default: 0)")

    def check(self) -> None:
        check_warmup(self, "inverse_sqrt")


@register_lr_scheduler("inverse_sqrt", dataclass=InverseSqrtConfig)
class InverseSqrtSchedule(Schedule):
    """A linear warmup of w updates to ``--lr``, then lr · √(w / n) after n updates (w = 1 without a warmup).

    Source: Vaswani et al. 2017, "Attention is all you need", eq. 3.
    """

    config: InverseSqrtConfig

    def rate(self, updates: int) -> float:
        warmup = self.config.warmup
        if updates < warmup:
            return warmed_up(updates, warmup, max(self.config.warmup_init_lr, 0.0), self.lr)
        # Without a warmup the decay begins after the first update: 0 has no inverse.
        return self.lr * (max(warmup, 1) / max(updates, 1)) ** 0.5


@dataclass(frozen=True)
class PolynomialDecayConfig(WarmupConfig):
    """Polynomial decay."""

    force_anneal: int | None = flag(None, "last epoch that follows a list of `lr`", aliases=("--fa",), low=1)
    end_learning_rate: float = flag(0.0, "final rate", low=0)
    power: float = flag(1.0, "exponent of the decay (1: linear)", above=0)
    total_num_update: int | None = flag(None, "updates until the final rate (default: `max_update`)", low=1)

    @property
    def total(self) -> int:
        """Updates until the final rate; SettingError if their number is left open."""
        if (total := self.total_num_update or self.max_update) <= 0:
            raise SettingError(
                "`lr_scheduler` polynomial_decay: ends at a known update; give `total_num_update` or `max_update`"
            )
        return total

    @property
    def needs_max_update(self) -> bool:
        return super().needs_max_update or (self.max_update <= 0 and self.total_num_update is None)

    def check(self) -> None:
        if not self.needs_max_update and self.total <= self.warmup:
            # As in fairseq, whose YAML files leave it out, it is the length of training.
            name = "max_update" if self.total_num_update is None else "total_num_update"
            raise SettingError(f"`{name}` {self.total}: must be greater than {self.warmup_as_set}; change one")
        if self.end_learning_rate > min(self.lr):
            raise SettingError(
                f"`end_learning_rate` {self.end_learning_rate}: must not be greater than "
                f"`lr` {min(self.lr)}; change one"
            )


@register_lr_scheduler("polynomial_decay", dataclass=PolynomialDecayConfig)
class PolynomialDecaySchedule(Schedule):
    """A linear warmup from 0, then end + (lr − end) · (share of the updates that are left)^power."""

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


@dataclass(frozen=True)
class TriStageConfig(RateConfig):
    """Three-stage schedule."""

    warmup_steps: int = flag(0, "warmup updates until `lr`", low=0)
    hold_steps: int = flag(0, "updates at `lr` after the warmup", low=0)
    decay_steps: int = flag(0, "updates of the exponential decay", low=0)
    phase_ratio: list[float] | None = flag(
        None, "fractions of `max_update` for the three stages, instead of their lengths", low=0, high=1, metavar="W,H,D"
    )
    init_lr_scale: float = flag(0.01, "initial rate as a fraction of `lr`", above=0)
    final_lr_scale: float = flag(0.01, "final rate as a fraction of `lr`", above=0)

    @property
    def stages(self) -> list[int]:
        """Updates of each stage; SettingError for shares of a training whose length is left open."""
        if self.phase_ratio is None:
            return [self.warmup_steps, self.hold_steps, self.decay_steps]
        # Not in check(): with --stages the length of training comes with the stage.
        if self.max_update <= 0:
            text = ",".join(map(str, self.phase_ratio))
            raise SettingError(f"`phase_ratio` {text}: needs `max_update`; give it")
        return [int(self.max_update * share) for share in self.phase_ratio]

    @property
    def needs_max_update(self) -> bool:
        return self.phase_ratio is not None and self.max_update <= 0

    def check(self) -> None:
        single_rate(self, "tri_stage")
        shares = self.phase_ratio
        if shares is None and not self.warmup_steps + self.hold_steps + self.decay_steps:
            raise SettingError(
                "`lr_scheduler` tri_stage: no stage has a length; give `phase_ratio`, or "
                "`warmup_steps`, `hold_steps` and `decay_steps`"
            )
        if shares is not None and (len(shares) != 3 or not math.isclose(sum(shares), 1, abs_tol=1e-6)):
            text = ",".join(map(str, shares))
            raise SettingError(f"`phase_ratio` {text}: expected three numbers that sum to 1")


@register_lr_scheduler("tri_stage", dataclass=TriStageConfig)
class TriStageSchedule(Schedule):
    """A linear warmup to ``--lr``, a constant rate, and an exponential decay to ``--lr`` · ``--final-lr-scale``.

    Source: Park et al. 2019, "SpecAugment", section 3.2.
    """

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


@dataclass(frozen=True)
class WSDConfig(WarmupConfig):
    """Warmup-stable-decay schedule."""

    total_num_update: int | None = flag(None, "updates until the rate is 0 (default: `max_update`)", low=1)
    decay_updates: int | None = flag(None, "updates of the final decay (default: 20% of all)", low=0)
    decay_ratio: float | None = flag(None, "final decay as a share of all updates, not `decay_updates`", low=0, high=1)
    decay_shape: str = flag("1-sqrt", "form of the final decay to 0", choices=("1-sqrt", "linear"))

    @property
    def total(self) -> int:
        """Updates of training; SettingError if their number is left open."""
        if (total := self.total_num_update or self.max_update) <= 0:
            raise SettingError(
                "`lr_scheduler` wsd: decays over the last updates; give `max_update` or `total_num_update`"
            )
        return total

    @property
    def decay(self) -> int:
        """Updates of the final decay."""
        if self.decay_ratio is not None:
            return whole_share(self.total, self.decay_ratio)
        return int(self.total * DECAY_SHARE) if self.decay_updates is None else self.decay_updates

    @property
    def needs_max_update(self) -> bool:
        return super().needs_max_update or (self.max_update <= 0 and self.total_num_update is None)

    def check(self) -> None:
        single_rate(self, "wsd")
        if not self.needs_max_update and self.warmup > self.total - self.decay:
            raise SettingError(
                f"{self.warmup_as_set}: warmup and the decay's {self.decay} updates exceed the "
                f"{self.total} updates of training; lower one, or give shares: `warmup_ratio`, `decay_ratio`"
            )


@register_lr_scheduler("wsd", dataclass=WSDConfig)
class WSDSchedule(Schedule):
    """A linear warmup to ``--lr``, a constant rate, and a decay to 0 over the last updates.

    With s the share of the decay that is over, the rate is lr · (1 − √s) or lr · (1 − s). The first update has the rate
    lr / warmup, the last one a rate above 0: no update is spent at rate 0.

    Source: Hu et al. 2024, "MiniCPM", section 4; Hägele et al. 2024, "Scaling laws and compute-optimal training beyond
    fixed training durations", section 3, for the form of the decay and its length.
    """

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


@dataclass(frozen=True)
class ReduceLROnPlateauConfig(WarmupConfig):
    """Reduction on a plateau."""

    lr_shrink: float = flag(0.1, "factor of the rate after each plateau", above=0, below=1)
    lr_threshold: float = flag(1e-4, "minimum relative improvement of the validation figure", low=0)
    lr_patience: int = flag(0, "epochs without improvement before the rate shrinks", low=0)
    maximize_best_checkpoint_metric: bool = flag(False, "largest validation figure is best")
    warmup_init_lr: float = flag(-1.0, "initial rate of the warmup (default: 0)")

    def check(self) -> None:
        check_warmup(self, "reduce_lr_on_plateau")


@register_lr_scheduler("reduce_lr_on_plateau", dataclass=ReduceLROnPlateauConfig)
class ReduceLROnPlateau(Schedule):
    """A linear warmup to ``--lr``, then ``--lr-shrink`` times less after each plateau of the validation figure.

    A plateau is more than ``--lr-patience`` epochs in a row of which none is better than the best by the threshold.
    """

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
        # fairseq stores torch's best value, which begins at infinity: every margin below it would be infinite, too.
        self.best = float(best) if best is not None and math.isfinite(best) else None
        self.lr = float(state.get("lr", self.optimizer.get_lr()))
        self.bad_epochs = int(state.get("bad_epochs", 0))
