"""Runs of an update or two, as tests of their parts make them."""

from __future__ import annotations

from typing import Any

import runs

from fairseq.config.settings import training_settings
from fairseq.distributed import Interruption, World
from fairseq.training.run import Run
from fairseq.training.stages import Stage

# An epoch has 5 updates of 40 rows of 16 tokens; the last one has 7 rows, one of them short.
FIVE = f"{runs.BASELINE} --decoder-layers 1 --max-tokens 640 --max-valid-steps 1"


def a_run(*flags: Any, world: World | None = None, stage: Stage | None = None, manager: Any = None) -> Run:
    settings = training_settings(runs.arguments(FIVE, *flags))
    return Run(settings, world or World(), manager, stage, Interruption())


def state(run: Run, updates: int = 0, epoch: int = 1, read: int = 0, rate: float = 1.0) -> Run:
    """*run* after so many updates and batches of an epoch."""
    run.trainer.num_updates = updates
    run.batches.load_state_dict({"epoch": epoch, "iterations_in_epoch": read})
    run.trainer.get_lr = lambda: rate  # type: ignore[method-assign]
    return run
