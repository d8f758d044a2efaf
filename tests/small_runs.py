"""Runs of an update or two, as tests of their parts make them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import runs

from fairseq.config.settings import training_settings
from fairseq.distributed import Interruption, World
from fairseq.training import loop
from fairseq.training.build import build_state
from fairseq.training.callbacks import callbacks_of
from fairseq.training.stages import Stage
from fairseq.training.state import TrainingState

# An epoch has 5 updates of 40 rows of 16 tokens; the last one has 7 rows, one of them short.
FIVE = f"{runs.BASELINE} --decoder-layers 1 --max-tokens 640 --max-valid-steps 1"
C = TypeVar("C")


class SmallRun(TrainingState):
    """The state of a run, with its callbacks."""

    callbacks: list[Any]

    def part(self, kind: type[C]) -> C:
        """The callback of *kind*."""
        return next(callback for callback in self.callbacks if isinstance(callback, kind))

    def train(self) -> None:
        """Train to the end."""
        loop.train_stage(self, self.callbacks)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context of training, in which no update is made."""
        with contextlib.ExitStack() as stack:
            for callback in self.callbacks:
                stack.enter_context(callback.running(self))
            yield

    def after_update(self) -> None:
        """What follows an update."""
        self.applied = True
        for callback in self.callbacks:
            callback.begin_epoch(self)
            callback.before_update(self)
        for callback in self.callbacks:
            callback.after_update(self)
        loop.finish_update(self, self.callbacks)


def a_run(
    *flags: Any,
    world: World | None = None,
    stage: Stage | None = None,
    manager: Any = None,
    interruption: Interruption | None = None,
    base: str = FIVE,
) -> SmallRun:
    settings = training_settings(runs.arguments(base, *flags))
    return the_run(settings, world, stage, manager, interruption)


def the_run(
    settings: Any,
    world: World | None = None,
    stage: Stage | None = None,
    manager: Any = None,
    interruption: Interruption | None = None,
) -> SmallRun:
    callbacks = callbacks_of(settings, world or World(), stage, manager, interruption)
    run: Any = build_state(settings, world or World(), stage)
    run.__class__ = SmallRun
    run.callbacks = callbacks
    return run


def state(run: SmallRun, updates: int = 0, epoch: int = 1, read: int = 0, rate: float = 1.0) -> SmallRun:
    """*run* after so many updates and batches of an epoch."""
    run.num_updates = updates
    run.batches.load_state_dict({"epoch": epoch, "iterations_in_epoch": read})
    run.get_lr = lambda: rate  # type: ignore[method-assign]
    return run
