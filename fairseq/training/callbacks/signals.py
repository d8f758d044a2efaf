"""Signals that ask a run to stop: after an update,
between batches of a validation, and after a save."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fairseq.distributed import Interruption
from fairseq.training.callbacks.callback import Callback
from fairseq.training.limit import Limit
from fairseq.training.state import TrainingState


class Signals(Callback):
    """Ends training on all ranks once a signal has asked one of them to stop."""

    def __init__(self, interruption: Interruption) -> None:
        self.interruption = interruption

    @contextlib.contextmanager
    def running(self, state: TrainingState) -> Iterator[None]:
        state.votes.register("interrupted", lambda: self.interruption.signal > 0)
        yield

    def validate(self, state: TrainingState) -> None:
        # A signal that came in the last batch: it is obeyed with the save that follows.
        if state.metric is not None:
            state.votes.poll("interrupted")

    def complete(self, state: TrainingState) -> None:
        # Saving takes long: a signal that came meanwhile does not wait for another update.
        if state.saved == state.num_updates:
            state.votes.poll("interrupted")
        if state.interrupted:
            # Whatever else is reached: the message of any other limit would call the run complete.
            state.end = Limit("a signal")
