"""In which precision a model computes: autocast, loss scaling, and the shape of its parameters."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from fairseq.errors import UserError


class Precision:
    """fp32, or the lower precision that ``--fp16``, ``--bf16`` or ``--memory-efficient-fp16`` ask for.

    Matrix products run in the lower precision; reductions, softmax and loss stay in float32.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.half_parameters = bool(getattr(args, "memory_efficient_fp16", False))
        self.dtype: torch.dtype | None = None
        if getattr(args, "fp16", False) and not self.half_parameters:
            self.dtype = torch.float16
        elif getattr(args, "bf16", False):
            self.dtype = torch.bfloat16

    @property
    def needs_scaling(self) -> bool:
        """Whether gradients are float16 somewhere, so that small ones would vanish unscaled."""
        return self.half_parameters or self.dtype == torch.float16

    def place(self, model: nn.Module, device: torch.device) -> None:
        """Move *model* to *device*, its parameters to their type."""
        model.to(device)
        if self.half_parameters:
            model.half()

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """The context of a forward pass."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.dtype)


class LossScaler:
    """Dynamic loss scaling: halved on overflow, doubled after ``window`` updates without one.

    Args:
        init_scale: first scale.
        window: updates without overflow before the scale is doubled.
        tolerance: share of overflowing updates since the last change that is borne before the scale is halved.
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
        """Take note of one update.

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
        """All that changes."""
        return {name: getattr(self, name) for name in ("scale", "updates", "last_rescale", "overflows")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state."""
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
