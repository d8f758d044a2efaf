"""Datasets that are read an epoch each in turn: opened when their epoch begins, the next one in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from fairseq.data.dataset import Dataset
from fairseq.data.samplers import Sampler
from fairseq.errors import UserError

logger = logging.getLogger(__name__)

Turn = tuple[Dataset, Sampler]


class Turns:
    """The dataset and sampler of each epoch; at most two are in memory, the epoch's and the next.

    Args:
        openers: functions that open them, all taken in turn. Each may run in a thread of its own.
    """

    def __init__(self, openers: Sequence[Callable[[], Turn]]) -> None:
        self._openers = openers
        self._current: tuple[int, Turn] | None = None
        self._next: _Opening | None = None
        self._fairseq = False

    @classmethod
    def of_one(cls, dataset: Dataset, sampler: Sampler) -> Turns:
        """Return the turns of epochs that all read one dataset."""
        return cls([lambda: (dataset, sampler)])

    def __len__(self) -> int:
        """Datasets that are read in turn."""
        return len(self._openers)

    def of(self, epoch: int) -> Turn:
        """Return dataset and sampler of *epoch* (from 1), opened now if not before; UserError if damaged."""
        # fairseq's rule: folder (epoch − 1) mod n.
        number = (epoch - 1) % len(self._openers)
        if self._current is None or self._current[0] != number:
            # Its memory is free before the next one is opened.
            self._current = None
            opened = self._take(number) or self._openers[number]()
            self._current = number, self._ordered(opened)
        return self._current[1]

    def open_next(self, epoch: int) -> None:
        """Open the dataset of the epoch after *epoch* in the background, unless it is also *epoch*'s."""
        number = epoch % len(self._openers)
        if len(self._openers) > 1 and (self._next is None or self._next.number != number):
            self._next = _Opening(number, self._openers[number])

    def close(self) -> None:
        """Wait for what is being opened and drop it; the openers may refer to a model."""
        self._take(-1)

    def in_fairseq_order(self) -> None:
        """Read all of them in the order of a run that fairseq began."""
        self._fairseq = True
        if self._current is not None:
            self._current = self._current[0], self._ordered(self._current[1])

    def _take(self, number: int) -> Turn | None:
        """What was opened in the background, if it is *number*; None if that failed: the caller tries again."""
        opening, self._next = self._next, None
        turn = opening.result() if opening is not None else None
        return turn if opening is not None and opening.number == number else None

    def _ordered(self, turn: Turn) -> Turn:
        return (turn[0], turn[1].in_fairseq_order()) if self._fairseq else turn


class _Opening:
    """One dataset on its way."""

    def __init__(self, number: int, opener: Callable[[], Turn]) -> None:
        self.number = number
        self._opener = opener
        self._turn: Turn | None = None
        # A daemon: a run that ends does not wait for data that it will not read.
        self._thread = threading.Thread(target=self._open, name="next data folder", daemon=True)
        self._thread.start()

    def result(self) -> Turn | None:
        """Wait for the dataset; None if it could not be opened."""
        self._thread.join()
        return self._turn

    def _open(self) -> None:
        try:
            self._turn = self._opener()
        except UserError as error:
            logger.warning("the next epoch's data cannot be read yet: %s", error.args[0])
        # Reported with its traceback where it is tried again.
        except Exception as error:
            logger.warning("the next epoch's data cannot be read yet: %s: %s", type(error).__name__, error)
