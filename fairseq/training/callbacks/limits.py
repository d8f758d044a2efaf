"""The limits of a run: updates, epochs, time, the learning rate, and patience."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import torch

from fairseq.training.callbacks.callback import Callback
from fairseq.training.limit import Limit
from fairseq.training.state import TrainingState

logger = logging.getLogger(__name__)


class Limits(Callback):
    """Ends training at the limit that is reached first."""

    def __init__(self, patience: int) -> None:
        self.patience = patience

    @contextlib.contextmanager
    def running(self, state: TrainingState) -> Iterator[None]:
        state.votes.register("late", lambda: self.is_late(state))
        # A restored run may be late already; clocks differ between ranks.
        late = state.cfg.stop_time_hours > 0 and bool(
            state.world.sum(torch.tensor(float(self.is_late(state)), device=state.world.device))
        )
        # What is left of the last update comes first.
        if not state.due.validate:
            state.end = self.reached(state, late)
        yield

    def after_update(self, state: TrainingState) -> None:
        if state.applied or state.batches.end_of_epoch:
            state.end = state.end or self.reached(state)

    def complete(self, state: TrainingState) -> None:
        # Once more: a validation uses up patience, and may lower the rate.
        state.end = state.end or self.reached(state)

    def is_late(self, state: TrainingState) -> bool:
        """Return whether training has taken longer than ``--stop-time-hours`` by this clock."""
        return 0 < state.cfg.stop_time_hours * 3600 < state.wall()

    def reached(self, state: TrainingState, late: bool = False) -> Limit | None:
        """Return the limit that is reached, None while training goes on; the same on all ranks."""
        cfg, updates, batches = state.cfg, state.num_updates, state.batches
        between = batches.end_of_epoch or batches.iterations_in_epoch == 0
        epochs = batches.epoch if batches.end_of_epoch else batches.epoch - 1
        stop_lr = state.lr_scheduler.stop_lr
        if 0 < self.patience <= state.best.without_improvement:
            logger.info("stopping: %d validations without improvement", state.best.without_improvement)
            return Limit(f"`patience` {self.patience}")
        if late or state.votes["late"]:
            return Limit(f"`stop_time_hours` {cfg.stop_time_hours:g}")
        if state.stage is not None and state.stage.max_update <= updates:
            return Limit(f"the end of `stages` {cfg.stages}", ends_stage=True)
        all_made = 0 < cfg.max_update <= updates
        if all_made and not state.length_from_data:
            return Limit(f"`max_update` {cfg.max_update}")
        if all_made or 0 < cfg.max_epoch <= epochs:
            return Limit(f"`max_epoch` {cfg.max_epoch}")
        # As in fairseq, a rate that is reached within an epoch lets the epoch be completed.
        if between and updates > 0 and state.get_lr() <= stop_lr:
            setting = "min_lr" if cfg.stop_min_lr is None else "stop_min_lr"
            return Limit(f"`{setting}` {stop_lr:g}", "lower")
        return None
