"""Precision of a model's computation and parameters."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from fairseq.config.settings import CommonConfig


class Precision:
    """fp32, or the lower precision of ``--fp16``, ``--bf16`` or ``--memory-efficient-fp16``.

    Matrix products run in the lower precision; reductions, softmax and loss stay in float32.
    """

    def __init__(self, common: CommonConfig | None = None) -> None:
        common = common or CommonConfig()
        self.half_parameters = common.memory_efficient_fp16
        self.dtype: torch.dtype | None = None
        if common.fp16 and not self.half_parameters:
            self.dtype = torch.float16
        elif common.bf16:
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
