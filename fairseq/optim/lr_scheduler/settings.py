"""Settings of the learning-rate schedules. Nothing here
imports torch: command lines are parsed without it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fairseq.config.fields import flag
from fairseq.config.settings import RateConfig, whole_share
from fairseq.errors import SettingError

DECAY_SHARE = 0.2
"""Share of the updates in which ``wsd`` decays, unless the user says: the share that Hägele et al.
2024 recommend."""


@dataclass(frozen=True)
class WarmupConfig(RateConfig):
    """Warmup of a schedule, whose length is a number of updates or a share of training."""

    warmup_updates: int = flag(0, "warmup updates until `lr`", low=0)
    warmup_ratio: float | None = flag(
        None, "warmup as a share of `max_update`; replaces `warmup_updates`", low=0, high=1
    )

    @property
    def warmup(self) -> int:
        """Updates of the warmup; SettingError for a share
        of a training whose length is left open."""
        if self.warmup_ratio is None:
            return self.warmup_updates
        return self.updates_of("warmup_ratio", self.warmup_ratio)

    @property
    def warmup_as_set(self) -> str:
        """The setting of the warmup with its value, for messages."""
        if self.warmup_ratio is None:
            return f"`warmup_updates` {self.warmup_updates}"
        return f"`warmup_ratio` {self.warmup_ratio:g}"

    @property
    def needs_max_update(self) -> bool:
        return self.warmup_ratio is not None and self.max_update <= 0


@dataclass(frozen=True)
class FixedConfig(WarmupConfig):
    """Fixed learning rates."""

    force_anneal: int | None = flag(
        None, "first epoch in which the rate shrinks instead of following `lr`", aliases=("--fa",), low=1
    )
    lr_shrink: float = flag(0.1, "factor of the rate each epoch from `force_anneal` on", above=0)


@dataclass(frozen=True)
class InverseSqrtConfig(WarmupConfig):
    """Inverse square root schedule."""

    warmup_updates: int = flag(4000, "warmup updates until `lr`", low=0)
    warmup_init_lr: float = flag(-1.0, "initial rate of the warmup (default: 0)")

    def check(self) -> None:
        check_warmup(self, "inverse_sqrt")


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
        """Updates of each stage; SettingError for shares
        of a training whose length is left open."""
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


@dataclass(frozen=True)
class WSDConfig(WarmupConfig):
    """Warmup-stable-decay schedule."""

    total_num_update: int | None = flag(None, "updates until the rate is 0 (default: `max_update`)", low=1)
    decay_updates: int | None = flag(None, "updates of the final decay (default: 20% of all)", low=0)
    decay_ratio: float | None = flag(
        None, "final decay as a share of all updates; replaces `decay_updates`", low=0, high=1
    )
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


@dataclass(frozen=True)
class ReduceLROnPlateauConfig(WarmupConfig):
    """Reduction on a plateau."""

    lr_shrink: float = flag(0.1, "factor of the rate after each plateau", above=0, below=1)
    lr_threshold: float = flag(1e-4, "minimum relative improvement of the validation metric", low=0)
    lr_patience: int = flag(0, "epochs without improvement before the rate shrinks", low=0)
    maximize_best_checkpoint_metric: bool = flag(False, "larger is better")
    warmup_init_lr: float = flag(-1.0, "initial rate of the warmup (default: 0)")

    def check(self) -> None:
        check_warmup(self, "reduce_lr_on_plateau")


@dataclass(frozen=True)
class CosineConfig(WarmupConfig):
    """Cosine annealing with warm restarts: with ``--max-lr`` as in fairseq up to 0.10.2, without it
    as in 0.12."""

    max_lr: float | None = flag(None, "maximum; `lr` is then the minimum (default: `lr`, from `min_lr`)", above=0)
    warmup_updates: int = flag(0, "warmup updates until the maximum", low=0)
    warmup_init_lr: float = flag(-1.0, "initial rate of the warmup (default: the minimum)")
    t_mult: float = flag(1.0, "length ratio of successive periods", low=1)
    lr_period_updates: float = flag(-1.0, "updates of the first period (default: `max_update` minus warmup)")
    lr_shrink: float = flag(0.1, "learning-rate ratio of successive periods", above=0)

    @property
    def rates(self) -> tuple[float, float]:
        """The minimum and the maximum: ``lr`` and ``max_lr`` where the latter is given, else
        ``min_lr`` and ``lr``."""
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
        """Updates of the first period; SettingError
        if it is left open, as is the length of training."""
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


@dataclass(frozen=True)
class TriangularConfig(RateConfig):
    """Triangular schedule."""

    max_lr: float | None = flag(None, "maximum learning rate, greater than `lr`", above=0)
    lr_period_updates: float = flag(5000.0, "updates per cycle", low=2)
    lr_shrink: float = flag(0.1, "factor of the maximum after each cycle", above=0)
    shrink_min: bool = flag(False, "also shrink the minimum by `lr_shrink`")

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


def single_rate(config: RateConfig, schedule: str) -> float:
    """The one ``lr`` of a schedule that cannot follow a list; SettingError if it is one."""
    if len(config.lr) != 1:
        text = ",".join(map(str, config.lr))
        raise SettingError(
            f"`lr` {text}: `lr_scheduler` {schedule} takes one rate; use `lr_scheduler` fixed for a list"
        )
    return config.lr[0]


def check_warmup(config: Any, schedule: str) -> None:
    """Raise SettingError if ``lr`` of a schedule
    with a warmup is a list, or less than ``warmup_init_lr``."""
    lr, initial = single_rate(config, schedule), max(config.warmup_init_lr, 0.0)
    if initial > lr:
        raise SettingError(f"`warmup_init_lr` {initial}: must not be greater than `lr` {lr}; change one")
