"""How many updates a run has, by its limits or its data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fairseq.config.settings import OptimizationConfig, TrainingSettings
from fairseq.data.iterator import EpochIterator


@dataclass(frozen=True)
class RunLength:
    """The number of updates of a run that leaves it open, and what it follows from."""

    updates: int
    epochs: int
    batches: list[int]  # of the epochs, one for each data folder
    update_freq: list[int]


def needs_length(settings: TrainingSettings) -> bool:
    """Whether the schedule of *settings* depends on ``max_update``, which they leave open."""
    return bool(getattr(settings.lr_scheduler, "needs_max_update", False))


def length_of(
    cfg: OptimizationConfig, batches: EpochIterator, done: int = 0, before: Mapping[str, Any] | None = None
) -> RunLength:
    """The length of a run from the position of *batches* to the end of ``max_epoch`` epochs, or of
    one.

    Args:
        cfg: its limits, and the batches of an update.
        done: updates behind it.
        before: the length with which these were made, as a checkpoint stores it. It stays, whatever
            updates were skipped, if it follows from the same batches.

    Raises:
        UserError: the data of one of these epochs are missing or damaged.
    """
    before = before or {}
    epochs = cfg.max_epoch or before.get("epochs") or (1 if done else batches.epoch)
    basis: dict[str, Any] = {"batches": batches.counts(epochs), "update_freq": list(cfg.update_freq), "epochs": epochs}
    if basis.items() <= before.items():
        return RunLength(updates=before["updates"], **basis)
    updates = done + updates_left(cfg, batches, epochs, basis["batches"])
    # Only a new optimizer after the last epoch has none left: it gets the schedule of a whole run.
    return RunLength(updates=updates or sum(basis["batches"]), **basis)


def updates_left(cfg: OptimizationConfig, batches: EpochIterator, epochs: int, counts: Sequence[int]) -> int:
    """The updates from the position of *batches* to the end of epoch *epochs*; *counts* are the
    batches of epochs, which take turns."""

    def updates(epoch: int, read: int = 0) -> int:
        # The last group of an epoch is an update, however few batches it has.
        return math.ceil((counts[(epoch - 1) % len(counts)] - read) / frequency(cfg, epoch))

    now = batches.epoch
    if now > epochs:
        return 0
    # From here on the frequency is the last one, and the turns repeat: epochs may be many.
    first = min(max(now, len(cfg.update_freq)), epochs) + 1
    turn = [updates(first + number) for number in range(len(counts))]
    rounds, more = divmod(epochs + 1 - first, len(turn))
    varied = sum(updates(epoch) for epoch in range(now + 1, first))
    return updates(now, batches.iterations_in_epoch) + varied + rounds * sum(turn) + sum(turn[:more])


def total_updates(cfg: OptimizationConfig, num_updates: int, batches: EpochIterator) -> int | None:
    """The updates of the whole run, by the limit that comes first; None without one.

    *batches* of training stand at the position that *num_updates* have reached; ``max_update`` is
    the last stage's.
    """
    limits = [cfg.max_update] if cfg.max_update else []
    if cfg.max_epoch:
        limits.append(num_updates + updates_left(cfg, batches, cfg.max_epoch, batches.known_counts()))
    return min(limits) if limits else None


def frequency(cfg: OptimizationConfig, epoch: int) -> int:
    """Batches of an update of *epoch*."""
    return cfg.update_freq[min(epoch, len(cfg.update_freq)) - 1]
