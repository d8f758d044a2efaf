"""Runs of an update or two, as tests of their parts make them."""

from __future__ import annotations

from typing import Any

import runs

from fairseq.config.settings import training_settings
from fairseq.distributed import Interruption, World
from fairseq.training.build import build_state
from fairseq.training.loop import Run
from fairseq.training.stages import Stage
from fairseq.training.state import TrainingState

# An epoch has 5 updates of 40 rows of 16 tokens; the last one has 7 rows, one of them short.
FIVE = f"{runs.BASELINE} --decoder-layers 1 --max-tokens 640 --max-valid-steps 1"


def a_run(*flags: Any, world: World | None = None, stage: Stage | None = None, base: str = FIVE) -> TrainingState:
    """The state of a run at its start."""
    return build_state(training_settings(runs.arguments(base, *flags)), world or World(), stage)


def train(state: TrainingState, manager: Any = None, interruption: Interruption | None = None) -> Run:
    """Train *state* to the end of its run."""
    run = Run(state, manager, interruption or Interruption(), [])
    run.train()
    return run


def state(run: TrainingState, updates: int = 0, epoch: int = 1, read: int = 0, rate: float = 1.0) -> TrainingState:
    """*run* after so many updates and batches of an epoch."""
    run.num_updates = updates
    run.batches.load_state_dict({"epoch": epoch, "iterations_in_epoch": read})
    run.get_lr = lambda: rate  # type: ignore[method-assign]
    return run
