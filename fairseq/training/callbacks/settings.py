"""The record of a run's settings, beside its checkpoints and in the log."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fairseq.checkpoint import CheckpointManager
from fairseq.config.settings import TrainingSettings
from fairseq.training import effective
from fairseq.training.callbacks.callback import Callback
from fairseq.training.state import TrainingState


class RunSettings(Callback):
    """Records the *settings* of all stages,
    with what is inferred and restored; on the first process."""

    def __init__(self, settings: TrainingSettings, manager: CheckpointManager) -> None:
        self.settings = settings
        self.manager = manager

    @contextlib.contextmanager
    def running(self, state: TrainingState) -> Iterator[None]:
        settings = self.settings.changed(**{**state.inferred, **state.restored})
        effective.record(settings, state.task, self.manager, has_work=state.end is None)
        yield
