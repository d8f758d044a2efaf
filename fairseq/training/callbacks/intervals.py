"""The intervals of validations and checkpoints: what is due after an update."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from fairseq.config.settings import CheckpointConfig, OptimizationConfig
from fairseq.training.callbacks.callback import Callback
from fairseq.training.due import Due
from fairseq.training.log import is_due
from fairseq.training.milestones import Milestones
from fairseq.training.state import TrainingState

SHORTEST = 1000
"""Updates between validations that nobody asked for, at least."""


class Intervals(Callback):
    """Decides what is due: at intervals of updates, epochs or text, and at the end of the run."""

    def __init__(self, saving: CheckpointConfig, milestones: Milestones) -> None:
        self.saving = saving
        self.milestones = milestones

    @contextlib.contextmanager
    def running(self, state: TrainingState) -> Iterator[None]:
        if state.restored_position is not None:
            # The position of the batches may be earlier than the one that was saved.
            self.milestones.restore(state.restored_position, state.batches)
        yield

    def after_update(self, state: TrainingState) -> None:
        if not (state.applied or state.batches.end_of_epoch):
            return
        saving, updates, epoch, ended = self.saving, state.num_updates, state.batches.epoch, state.batches.end_of_epoch
        interval = validation_interval(saving, state.cfg, math.ceil(len(state.batches) / state.frequency))
        scheduled, last = is_due(updates, interval), state.end is not None
        save = (
            self.milestones.passed(state.batches)
            or last
            or is_due(updates, saving.save_interval_updates)
            or (ended and epoch % saving.save_interval == 0)
            or (scheduled and saving.validate_interval_updates is None)
        )
        validate = last or scheduled or (epoch % saving.validate_interval == 0 if ended else save)
        validate = validate and bool(state.validation) and updates >= saving.validate_after_updates
        state.due = Due(epoch, ended, validate, save, self.milestones.name or "")
        state.metric, state.is_best = None, False


def validation_interval(saving: CheckpointConfig, cfg: OptimizationConfig, epoch_updates: int) -> int:
    """Updates between validations within epochs of *epoch_updates*; 0: none.

    A long run is validated and saved ten times, if its epochs do not end more often and the user
    asks for no interval.
    """
    if saving.validate_interval_updates is not None:
        return saving.validate_interval_updates
    if saving.save_interval_updates or saving.save_interval_words or saving.save_interval_tokens:
        return 0
    interval = max(SHORTEST, math.ceil((cfg.max_update or (cfg.max_epoch or 1) * epoch_updates) / 10))
    return interval if interval < epoch_updates else 0
