"""The best validation figure of a run: the one seen, the one saved, and how long ago it was."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Best:
    """The best figures so far, as a value: each validation and each save gives a new one.

    ``seen`` and ``saved`` differ where validations are more frequent than checkpoints.

    Attributes:
        maximize: the largest figure is the best, not the smallest.
        seen: the best figure of all validations, None before the first.
        saved: the figure of ``checkpoint_best.pt``, None before there is one.
        without_improvement: validations since ``seen``.
    """

    maximize: bool = False
    seen: float | None = None
    saved: float | None = None
    without_improvement: int = 0

    def validated(self, figure: float) -> Best:
        """The value after a validation that gave *figure*; NaN never improves anything, an equal figure does not."""
        # As in fairseq, an equal figure is no improvement for --patience.
        improves = not math.isnan(figure) and (self.seen is None or self._sign * figure < self._sign * self.seen)
        if improves:
            return replace(self, seen=figure, without_improvement=0)
        return replace(self, without_improvement=self.without_improvement + 1)

    def better(self, figure: float) -> float:
        """The better one of *figure* and the best figure seen."""
        return figure if self.seen is None else (max if self.maximize else min)(figure, self.seen)

    def is_worth_saving(self, figure: float | None) -> bool:
        """Return whether a checkpoint with *figure* becomes ``checkpoint_best.pt``: ties do, NaN never does."""
        if figure is None or math.isnan(figure):
            return False
        # As in fairseq, an equal figure replaces checkpoint_best.pt.
        return self.saved is None or self._sign * figure <= self._sign * self.saved

    def after_saving(self, figure: float | None) -> Best:
        """The value once a checkpoint with *figure* is on disk."""
        return replace(self, saved=figure) if self.is_worth_saving(figure) else self

    def state_dict(self) -> dict[str, Any]:
        """Entries of a checkpoint's ``extra_state``."""
        return {"best": self.seen, "best_saved": self.saved, "without_improvement": self.without_improvement}

    def restored(self, extra: Mapping[str, Any], forget: bool = False) -> Best:
        """The value that ``extra_state`` holds; with *forget* no figure counts any more (another optimizer).

        Checkpoints of fairseq have ``best`` alone.
        """
        count = int(extra.get("without_improvement") or 0)
        seen = None if forget else extra.get("best")
        saved = None if seen is None else extra.get("best_saved", seen)
        return replace(self, seen=seen, saved=saved, without_improvement=count)

    @property
    def _sign(self) -> float:
        return -1.0 if self.maximize else 1.0
