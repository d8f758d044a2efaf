"""A rate that shrinks when validation stops improving."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fairseq.config.fields import flag, typed
from fairseq.config.registry import register_lr_scheduler
from fairseq.config.settings import RateConfig
from fairseq.optim.fairseq_optimizer import FairseqOptimizer
from fairseq.optim.lr_scheduler.fairseq_lr_scheduler import FairseqLRScheduler, check_warmup


@dataclass(frozen=True)
class ReduceLROnPlateauConfig(RateConfig):
    """Reduction on a plateau."""

    lr_shrink: float = flag(0.1, "factor of the rate after each plateau", above=0, below=1)
    lr_threshold: float = flag(1e-4, "minimum relative improvement of the validation figure", low=0)
    lr_patience: int = flag(0, "epochs without improvement before the rate shrinks", low=0)
    warmup_updates: int = flag(0, "warmup updates until `lr`", low=0)
    maximize_best_checkpoint_metric: bool = flag(False, "largest validation figure is best")
    warmup_init_lr: float = flag(-1.0, "initial rate of the warmup (default: 0)")

    def check(self) -> None:
        check_warmup(self, "reduce_lr_on_plateau")


@register_lr_scheduler("reduce_lr_on_plateau", dataclass=ReduceLROnPlateauConfig)
class ReduceLROnPlateau(FairseqLRScheduler):
    """A linear warmup to ``--lr``, then ``--lr-shrink`` times less after each plateau of the validation figure.

    A plateau is more than ``--lr-patience`` epochs in a row of which none is better than the best by the threshold.
    """

    restored_settings = ("lr",)

    def __init__(self, args: ReduceLROnPlateauConfig, optimizer: FairseqOptimizer) -> None:
        super().__init__(args, optimizer)
        self.config = config = typed(ReduceLROnPlateauConfig, args)
        self.sign = -1.0 if config.maximize_best_checkpoint_metric else 1.0
        self.peak = self.lr = config.lr[0]
        self.init_lr = max(config.warmup_init_lr, 0.0)
        self.bad_epochs = 0
        self.num_updates = 0
        self.step_update(0)

    def step(self, epoch: int, val_loss: float | None = None) -> float:
        # The warmup raises the rate, whatever validations say.
        if val_loss is not None and self.num_updates >= self.config.warmup_updates:
            if self._is_better(val_loss):
                self.best, self.bad_epochs = val_loss, 0
            else:
                self.bad_epochs += 1
            if self.bad_epochs > self.config.lr_patience:
                self.lr *= self.config.lr_shrink
                self.bad_epochs = 0
        return self.step_update(self.num_updates)

    def step_update(self, num_updates: int) -> float:
        self.num_updates = num_updates
        warmup = self.config.warmup_updates
        warming = num_updates < warmup
        lr = self.init_lr + num_updates * (self.peak - self.init_lr) / warmup if warming else self.lr
        self.optimizer.set_lr(lr)
        return lr

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "lr": self.lr, "bad_epochs": self.bad_epochs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; fairseq's has no rate: the restored optimizer has it."""
        best = state.get("best")
        # fairseq stores torch's best value, which begins at infinity: every margin below it would be infinite, too.
        self.best = float(best) if best is not None and math.isfinite(best) else None
        self.lr = float(state.get("lr", self.optimizer.get_lr()))
        self.bad_epochs = int(state.get("bad_epochs", 0))

    def _is_better(self, figure: float) -> bool:
        if self.best is None:
            return not math.isnan(figure)
        # Relative to the best figure, as torch's threshold_mode="rel".
        margin = self.config.lr_threshold * self.best
        # With sign −1 both sides are turned: larger is better, and the margin lies above the best.
        return self.sign * figure < self.sign * (self.best - self.sign * margin)
