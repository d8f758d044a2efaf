"""Base class of learning-rate schedules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fairseq.config.fields import typed
from fairseq.config.registry import LR_SCHEDULERS
from fairseq.config.settings import RateConfig, TrainingSettings, training_settings
from fairseq.config.shared import Part
from fairseq.optim.fairseq_optimizer import FairseqOptimizer


@LR_SCHEDULERS.extend
class FairseqLRScheduler(Part):
    """A schedule: the learning rate after so many updates, which the next update uses.

    ``step_update(0)`` gives the rate before the first update. Ours are functions of the number of
    updates and of the epoch alone, so that a restored run goes on exactly: call
    ``step_begin_epoch`` and ``step_update`` after restoring.
    """

    settings_name = "lr_scheduler"
    restored_settings: tuple[str, ...] = ()
    """Settings that a restored state replaces."""

    def __init__(self, args: Any, optimizer: FairseqOptimizer) -> None:
        self.args = self.cfg = args
        self.optimizer = optimizer
        self.best: float | None = None  # the smallest validation loss

    @property
    def stop_lr(self) -> float:
        """The rate at or below which training stops."""
        config = typed(RateConfig, self.args)
        return config.min_lr if config.stop_min_lr is None else config.stop_min_lr

    def step_begin_epoch(self, epoch: int) -> float:
        """Set and return the rate for the first update of *epoch* (counted from 1)."""
        return self.optimizer.get_lr()

    def step(self, epoch: int, val_loss: float | None = None) -> float:
        """Record the validation at the end of *epoch*; return the rate."""
        if val_loss is not None:
            self.best = val_loss if self.best is None else min(self.best, val_loss)
        return self.optimizer.get_lr()

    def step_update(self, num_updates: int) -> float:
        """Set and return the rate after *num_updates* updates."""
        return self.optimizer.get_lr()

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best = state.get("best")


class Schedule(FairseqLRScheduler):
    """Base of schedules that define :meth:`rate`,
    which depends on settings, updates, and :attr:`lr`.

    That is the rate which the user gave; in some schedules it changes with epochs or validations.
    """

    def __init__(self, args: Any, optimizer: FairseqOptimizer) -> None:
        super().__init__(args, optimizer)
        assert self.config_class is not None
        self.config: Any = typed(self.config_class, args)
        self.lr: float = self.config.lr[0]
        self.num_updates = 0
        self.step_begin_epoch(1)

    def rate(self, updates: int) -> float:
        """The rate after so many *updates*."""
        raise NotImplementedError

    def step_begin_epoch(self, epoch: int) -> float:
        return self.step_update(self.num_updates)

    def step_update(self, num_updates: int) -> float:
        self.num_updates = num_updates
        lr = self.rate(num_updates)
        self.optimizer.set_lr(lr)
        return lr


def build_lr_scheduler(settings: TrainingSettings, optimizer: FairseqOptimizer) -> FairseqLRScheduler:
    """The schedule that *settings* choose; it has given *optimizer* the first update's rate.

    Raises:
        UserError: no schedule has that name, or its settings are wrong or contradict each other.
    """
    settings = training_settings(settings)
    cls = LR_SCHEDULERS[settings.chosen.lr_scheduler]
    return cls(cls.settings_of(settings), optimizer)


def rate_of_epoch(rates: list[float], epoch: int) -> float:
    """Return the rate of *epoch* (counted from 1) in a list
    of ``--lr``; its last one holds afterwards."""
    return rates[min(max(epoch, 1), len(rates)) - 1]


def warmed_up(updates: int, warmup: int, initial: float, peak: float) -> float:
    """The rate after *updates* of a linear *warmup* from *initial* to *peak*."""
    return initial + updates * (peak - initial) / warmup


LegacyFairseqLRScheduler = FairseqLRScheduler  # its name for schedules of the namespace
