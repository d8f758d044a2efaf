"""Checkpoints of a run: last, best, at intervals and milestones, and the state before a NaN."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path

from fairseq.checkpoint import CheckpointManager
from fairseq.checkpoint.manager import SavePoint
from fairseq.config.settings import CheckpointConfig
from fairseq.training.callbacks.callback import Callback
from fairseq.training.nonfinite import FILE, Finding, NonFinite, check_weights
from fairseq.training.saving import Saver
from fairseq.training.state import TrainingState

logger = logging.getLogger(__name__)

LONG = 30.0
"""Seconds that a validation takes before which a run is saved; SLURM's time between SIGTERM and
SIGKILL."""


class Checkpoints(Callback):
    """Saves the state where that is due, where a validation improves or a limit is reached, and
    before long ones."""

    def __init__(self, cfg: CheckpointConfig, saver: Saver, manager: CheckpointManager | None) -> None:
        self.cfg = cfg
        self.saver = saver
        self.manager = manager
        self.saved_at = time.perf_counter()

    @contextlib.contextmanager
    def running(self, state: TrainingState) -> Iterator[None]:
        state.votes.register("save", self.is_late)
        if state.former_best is not None and self.manager is not None:
            self.manager.set_best_aside(state.former_best.get("number"))
        try:
            yield
        except NonFinite as error:
            # Weights, optimizer and carried state are as before the update: with the batches that
            # the finding names, it can be repeated.
            self.save_for_inspection(state, error.finding)
            raise
        self.saver.wait()

    def validate(self, state: TrainingState) -> None:
        # Before the validation: time is short where a signal waits, and a long one may not end.
        if state.due.validate and (state.interrupted or self.is_long(state)):
            self.save(state)

    def complete(self, state: TrainingState) -> None:
        improves = state.metric is not None and self.improves(state)
        if state.due.validate:
            # The validation was interrupted, and the state may be saved already.
            if state.saved != state.num_updates:
                self.save(state)
        elif state.due.save or improves or state.end is not None or state.interrupted or state.votes["save"]:
            self.save(state)

    def is_late(self) -> bool:
        """Return whether the last save is ``--save-interval-minutes``
        ago, by this process's clock."""
        return 0 < self.cfg.save_interval_minutes * 60 < time.perf_counter() - self.saved_at

    def is_long(self, state: TrainingState) -> bool:
        """Return whether the next validation may take longer than :data:`LONG`, as the first
        process sees it."""
        speed = state.clock.speeds("train", state.meters["train"], state.clock.elapsed())["ups"] * state.frequency
        limit = state.settings.data.max_valid_steps
        steps = sum(min(len(batches), limit or len(batches)) for batches in state.validation.values())
        # By training's speed: a forward pass takes a third, batches of validation may be larger.
        return state.world.share(speed > 0 and steps / speed > LONG)

    def improves(self, state: TrainingState) -> bool:
        """Return whether the last metric is the best so far,
        or among the best that are kept; on every process."""
        if state.is_best or self.cfg.keep_best_checkpoints <= 0:
            return state.is_best
        assert state.metric is not None
        return state.world.share(self.manager is not None and self.manager.is_among_best(state.metric))

    def save(self, state: TrainingState) -> None:
        """Save a checkpoint, on every process.

        Raises:
            UserError: weights are not finite, or the checkpoint cannot be written.
        """
        if self.cfg.no_save:
            return
        with state.clock.paused():
            due, updates = state.due, state.num_updates
            check_weights(dict(state.reducer.named_parameters()), state.world, updates)
            point = SavePoint(
                due.epoch, updates, due.end_of_epoch, state.is_best, state.metric, due.milestone, due.validate
            )
            self.saver.save(state.state_dict(), point)
            self.saved_at, state.saved = time.perf_counter(), updates
            state.votes.answer("save")
            state.world.barrier()

    def save_for_inspection(self, state: TrainingState, finding: Finding) -> None:
        """Save the state before an update that is not finite,
        and what is known of it, as ``nonfinite.pt``."""
        if self.cfg.no_save:
            return
        saved = state.state_dict()
        # Under the names that these files have always had.
        known = {"update": finding.update, "ids": finding.ids, "place": finding.location}
        saved["extra_state"]["nonfinite"] = known
        self.saver.save_as(FILE, saved, state.batches.epoch, state.num_updates)
        logger.error("saved %s for inspection", Path(self.cfg.save_dir) / FILE)
        state.world.barrier()
