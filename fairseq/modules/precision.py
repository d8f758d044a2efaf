"""Precision of a model's computation and parameters."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from fairseq.modules.ngram_notes import is_sparse

logger = logging.getLogger(__name__)


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
        # Parameters in half precision leave nothing for autocast to lower.
        if flags is not None and flags.fp16 and not self.half_parameters:
            self.dtype = torch.float16
        elif flags is not None and flags.bf16:
            self.dtype = torch.bfloat16

    @property
    def needs_scaling(self) -> bool:
        """True if any gradients are float16,
        in which small values underflow without loss scaling."""
        return self.half_parameters or self.dtype == torch.float16

    def name(self, device: torch.device) -> str:
        """Return what matrix products on *device* run in: fp32, fp16 or bf16."""
        dtype = torch.float16 if self.half_parameters else self.on(device)
        return {None: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]

    def move(self, model: nn.Module, device: torch.device | None) -> None:
        """Move *model* to *device*, unless that is None, and cast its parameters, but for tables
        whose gradients are sparse: CPUs add up none of half precision."""
        if device is not None:
            model.to(device)
        if self.half_parameters:
            model.half()
            for table in filter(is_sparse, model.modules()):
                table.float()
        if device is not None:
            for module in model.modules():
                flatten: Any = getattr(module, "flatten_parameters", None)  # recurrent layers have it
                if flatten is not None:
                    flatten()

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the autocast context of a forward pass."""
        dtype = self.on(device)
        return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)

    def on(self, device: torch.device) -> torch.dtype | None:
        """Return the lower precision of matrix products
        on *device*; None: they are computed in float32."""
        dtype = None if self.dtype is None else fastest(self.dtype, device)
        return None if dtype == torch.float32 else dtype


def fastest(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return *dtype*; float32 instead of bfloat16 on a CPU
    that multiplies matrices faster in float32."""
    return torch.float32 if dtype == torch.bfloat16 and device.type == "cpu" and bfloat16_is_slower() else dtype


@functools.cache
def bfloat16_is_slower() -> bool:
    """Return True where this CPU multiplies matrices
    faster in float32 than in bfloat16, and log that.

    It follows from the processor's features and is not measured:
    runs on one machine must have the same numbers.
    """
    features: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.13
    # Only x86 was measured, where AMX makes bfloat16 the faster one.
    if features.get("architecture") != "x86_64" or features["amx_bf16"]:
        return False
    # Without AVX-512's dot products they are emulated: 28 of float32's 130 GFLOP/s. Intel's cores
    # start one such product every second cycle and reach 74; AMD's are four times as fast as in
    # float32 (benchmarks/results/README.md).
    slower = not features["avx512_bf16"] or "Intel" in features["cpu_name"]
    if slower:
        logger.warning("`bf16`: this processor is faster in float32, which is used instead")
    return slower


def has_float16_arithmetic() -> bool:
    """Return whether CPU matrix products run in float16;
    True where the build of PyTorch does not report it."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
    return supported is None or bool(supported())
