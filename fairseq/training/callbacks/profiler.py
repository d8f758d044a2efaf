"""The profile of some updates, with ``--profile``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fairseq.training.callbacks.callback import Callback
from fairseq.training.profiling import Window, profiling
from fairseq.training.state import TrainingState


class Profiler(Callback):
    """Profiles the updates of *window*, if there is one, on the first process."""

    def __init__(self, window: Window | None, save_dir: str) -> None:
        self.window = window
        self.save_dir = save_dir
        self.update = contextlib.ExitStack()

    @contextlib.contextmanager
    def running(self, state: TrainingState) -> Iterator[None]:
        with profiling(self.window, self.save_dir, state.world) as self.observed:
            yield

    def before_update(self, state: TrainingState) -> None:
        self.update.enter_context(self.observed(state.num_updates))

    def after_update(self, state: TrainingState) -> None:
        self.update.close()
