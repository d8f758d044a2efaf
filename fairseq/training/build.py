"""Construction of a run: task, model, criterion, and its state with the data that it reads."""

from __future__ import annotations

import numpy as np
import torch

from fairseq.config.fields import parse_dict
from fairseq.config.settings import TrainingSettings
from fairseq.data.iterator import EpochIterator
from fairseq.distributed import World
from fairseq.distributed.sharding import build_device
from fairseq.errors import UserError, nearest
from fairseq.tasks.fairseq_task import setup_task
from fairseq.training.stages import Stage
from fairseq.training.state import TrainingState


def build_state(settings: TrainingSettings, world: World, stage: Stage | None = None) -> TrainingState:
    """Return the initial state of the run that *settings* describe, or of its *stage*, whose
    settings they are.

    Raises:
        UserError: settings are invalid or contradict each other, or the data are missing.
    """
    # Used after hours only, so that a mistake in it is found now.
    parse_dict("`optimizer_overrides`", settings.checkpoint.optimizer_overrides)
    splits = [split.strip() for split in settings.data.valid_subset.split(",")]
    if not all(splits):
        value = repr(settings.data.valid_subset)
        raise UserError(f"`valid_subset` {value}: empty name; `disable_validation` skips validation")
    # Here and not at start-up: what other stages drew
    # must not change the initial values of this one.
    torch.manual_seed(settings.common.seed)
    task = setup_task(settings)
    # What the task changed while it was set up; values
    # that it set on the caller's settings are the same objects.
    before = settings.flat
    inferred = {name: value for name, value in task.settings.flat.items() if value is not before.get(name)}
    settings = settings.changed(**inferred) if inferred else settings
    with build_device(settings.distributed, world):
        model = task.build_model(settings)
    criterion = task.build_criterion(settings)
    # From here on processes differ: the parameters are the same on all, dropout is not.
    if world.rank > 0:
        # Hashed: with a sum, rank 1 of seed 1 would draw the dropout of rank 0 of seed 2.
        sequence = np.random.SeedSequence([settings.common.seed, world.rank])
        torch.manual_seed(int(sequence.generate_state(1)[0]))
    state = TrainingState(settings, task, model, criterion, world, stage)
    state.found = inferred

    def iterator(split: str, training: bool) -> EpochIterator:
        return task.iterator(
            split,
            state.model,
            state.criterion,
            training=training,
            rank=world.rank,
            world_size=world.size,
            device=world.device,
        )

    state.batches = iterator(settings.data.train_subset, training=True)
    if not settings.checkpoint.disable_validation:
        state.validation = {split: iterator(split, training=False) for split in splits}
    metric, known = settings.checkpoint.best_checkpoint_metric, [*state.figures, "wpb", "bsz"]
    # Names of figures may be known only once they were logged.
    if metric not in known and not hasattr(state.figures, "of"):
        raise UserError(f"`best_checkpoint_metric` {metric}: not a figure of validation; {nearest(metric, known)}")
    return state
