"""Dynamic loss scaling for float16 training."""

from __future__ import annotations

from typing import Any

from fairseq.errors import UserError


class LossScaler:
    """Dynamic loss scaling: halved on overflow, doubled after ``window`` updates without one.

    Args:
        init_scale: first scale.
        window: updates without overflow before the scale is doubled.
        tolerance: share of overflowing updates since the last change above which the scale is halved.
        lowest: training stops below this.
        threshold: the scale is never lowered below this, if given.
    """

    def __init__(
        self,
        init_scale: float,
        window: int,
        tolerance: float = 0.0,
        lowest: float = 1e-4,
        threshold: float | None = None,
    ) -> None:
        self.scale = init_scale
        self.window = window
        self.tolerance = tolerance
        self.lowest = lowest
        self.threshold = threshold
        self.updates = 0
        self.last_rescale = 0
        self.overflows = 0

    def update(self, overflow: bool) -> None:
        """Record one update.

        Raises:
            UserError: the scale fell below the lowest.
        """
        self.updates += 1
        if overflow:
            self.overflows += 1
            if self.overflows / (self.updates - self.last_rescale) >= self.tolerance:
                self._lower()
        elif (self.updates - self.last_rescale) % self.window == 0:
            self.scale *= 2.0
            self._restart()

    def state_dict(self) -> dict[str, float | int]:
        """Return what changes."""
        return {name: getattr(self, name) for name in ("scale", "updates", "last_rescale", "overflows")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        for name, value in state.items():
            setattr(self, name, value)

    def _lower(self) -> None:
        self.scale /= 2.0
        if self.threshold is not None:
            self.scale = max(self.scale, self.threshold)
        self._restart()
        if self.scale < self.lowest:
            raise UserError(
                f"--min-loss-scale {self.lowest}: the loss scale fell below it, so gradients overflow at any scale; "
                "lower the learning rate, clip gradients, or train with --bf16"
            )

    def _restart(self) -> None:
        self.last_rescale = self.updates
        self.overflows = 0
