"""Hooks: what users add to a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fairseq.config.settings import TrainingSettings
from fairseq.training.state import TrainingState


class Hook:
    """Something that accompanies training; each method does nothing unless it is overridden.

    It is given the state of the run, and keeps settings of its own. It may set ``state.end`` to a
    text, the reason why training ends: on every rank after the same update.
    """

    def on_start(self, state: TrainingState) -> None:
        """Called before the first update of a run, or of each of its stages; *state* is restored. A
        run that it ends saves nothing."""

    def on_update(self, state: TrainingState) -> None:
        """Called after each update that was applied, before its validation."""

    def on_validate(self, state: TrainingState) -> None:
        """Called after a validation; ``state.metric`` is that of its first split."""

    def on_end(self, state: TrainingState) -> None:
        """Called after the last update of a run, or of each of its stages, and after its save; not
        after an error."""


Factory = Callable[[TrainingSettings], Hook]
"""Makes a hook for a run with these settings, on each process."""
F = TypeVar("F", bound=Factory)
_FACTORIES: list[Factory] = []


def register_hook(factory: F) -> F:
    """Add what *factory*, a function or a class, makes
    of the run's settings to every training of this process."""
    _FACTORIES.append(factory)
    return factory


def registered_hooks(settings: TrainingSettings) -> list[Hook]:
    """Return the registered hooks of a run with *settings*."""
    return [factory(settings) for factory in _FACTORIES]
