"""The interface of callbacks, and the registry of further ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

from fairseq.config.settings import TrainingSettings
from fairseq.training.state import TrainingState


class Callback:
    """Something that accompanies training; each method does nothing unless it is overridden.

    It is given the state of the run, and keeps settings of its own. It may set ``state.end`` to a
    :class:`~fairseq.training.limit.Limit` after an update that is applied, on every rank after the
    same one: ``state.votes`` agrees on that.
    """

    def running(self, state: TrainingState) -> contextlib.AbstractContextManager[None]:
        """Context of the whole training, of each stage for itself; *state* is restored."""
        return contextlib.nullcontext()

    def begin_epoch(self, state: TrainingState) -> None:
        """Called before the first update of an epoch, or of the rest of one that is resumed."""

    def before_update(self, state: TrainingState) -> None:
        """Called before each update."""

    def after_update(self, state: TrainingState) -> None:
        """Called after each update, and before its validation;
        an update that was skipped is not ``state.applied``."""

    def validate(self, state: TrainingState) -> None:
        """Called where a validation may be due, see ``state.due``; first of all if a restored run
        has one to do."""

    def complete(self, state: TrainingState) -> None:
        """Called when nothing changes the state before the next update: it may be saved."""


Factory = Callable[[TrainingSettings], Callback]
"""Makes a callback for a run with these settings, on each process."""
F = TypeVar("F", bound=Factory)
_FACTORIES: list[Factory] = []


def register_callback(factory: F) -> F:
    """Add what *factory*, a function or a class, makes
    of the run's settings to every training of this process."""
    _FACTORIES.append(factory)
    return factory


def registered_callbacks(settings: TrainingSettings) -> list[Callback]:
    """Return the registered callbacks of a run with *settings*."""
    return [factory(settings) for factory in _FACTORIES]
