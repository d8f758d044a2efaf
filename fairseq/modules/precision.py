"""Precision of a model's computation and parameters."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn


class Flags(Protocol):
    """The settings that choose a precision."""

    @property
    def fp16(self) -> bool: ...
    @property
    def bf16(self) -> bool: ...
    @property
    def memory_efficient_fp16(self) -> bool: ...


class Precision:
    """fp32, or the lower precision of ``--fp16``, ``--bf16`` or ``--memory-efficient-fp16``.

    Matrix products run in the lower precision; reductions, softmax and loss stay in float32.
    """

    def __init__(self, flags: Flags | None = None) -> None:
        self.half_parameters = flags is not None and flags.memory_efficient_fp16
        self.dtype: torch.dtype | None = None
        if flags is not None and flags.fp16 and not self.half_parameters:
            self.dtype = torch.float16
        elif flags is not None and flags.bf16:
            self.dtype = torch.bfloat16

    @property
    def needs_scaling(self) -> bool:
        """True if any gradients are float16, in which small values underflow without loss scaling."""
        return self.half_parameters or self.dtype == torch.float16

    def place(self, model: nn.Module, device: torch.device | None) -> None:
        """Move *model* to *device*, unless that is None, and cast its parameters."""
        if device is not None:
            model.to(device)
        if self.half_parameters:
            model.half()

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the autocast context of a forward pass."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.dtype)
