"""The number of updates of a run, which may follow from its data."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fairseq.config.settings import OptimizationConfig, TrainingSettings
from fairseq.data.iterator import EpochIterator


def frequency(cfg: OptimizationConfig, epoch: int) -> int:
    """Batches of an update of *epoch*."""
    return cfg.update_freq[min(epoch, len(cfg.update_freq)) - 1]


def updates_left(cfg: OptimizationConfig, batches: EpochIterator, epochs: int, counts: Sequence[int]) -> int:
    """The updates from the position of *batches* to the end of epoch *epochs*; *counts* are the
    batches of epochs, which take turns."""

    def updates(epoch: int, read: int = 0) -> int:
        # The last group of an epoch is an update, however few batches it has.
        return math.ceil((counts[(epoch - 1) % len(counts)] - read) / frequency(cfg, epoch))

    now = batches.epoch
    if now > epochs:
        return 0
    # From some epoch on the frequency is the last one, and turns repeat: epochs may be many.
    steady = min(max(now, len(cfg.update_freq)), epochs) + 1
    turn = [updates(steady + number) for number in range(len(counts))]
    rounds, more = divmod(epochs + 1 - steady, len(turn))
    varied = sum(updates(epoch) for epoch in range(now + 1, steady))
    return updates(now, batches.iterations_in_epoch) + varied + rounds * sum(turn) + sum(turn[:more])


def with_max_update(settings: TrainingSettings, batches: EpochIterator, done: int = 0) -> TrainingSettings:
    """*settings* with a ``max_update`` if their schedule needs one: *done* updates, and those from
    the position of *batches* to the end of ``max_epoch`` epochs, or of one.

    Raises:
        UserError: the data of one of these epochs are missing or damaged.
    """
    if not getattr(settings.lr_scheduler, "needs_max_update", False):
        return settings
    cfg = settings.optimization
    epochs = cfg.max_epoch or 1
    return settings.changed(max_update=max(done + updates_left(cfg, batches, epochs, batches.counts(epochs)), 1))
