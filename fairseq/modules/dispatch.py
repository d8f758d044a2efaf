"""The decision whether kernels in C or torch's operators compute, made here for all of them."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn


def kernels(part: str, *tensors: Tensor) -> Any:
    """The module *part* of ``fairseq.kernels`` where its operators compute *tensors*, else None.

    They take float32 and bfloat16 on CPUs, and need a C compiler.
    """
    for x in tensors:
        if not is_cpu(x) or x.dtype not in (torch.float32, torch.bfloat16) or not x.numel():
            return None
        # Subclasses, such as distributed tensors, may have no data at their address.
        if type(x) not in (Tensor, nn.Parameter):
            return None
    return compiled(part)


def compiled(part: str) -> Any:
    """The module *part* of ``fairseq.kernels`` if its kernels can be compiled, else None."""
    return _MODULES[part] if _is_compiled(part) else None


def is_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu"


def on_cpu(x: Tensor) -> bool:
    """Return True where *x* is computed by the steps written out for CPUs; torch.compile has
    kernels of its own."""
    return is_cpu(x) and not torch.compiler.is_compiling()


_MODULES: dict[str, Any] = {}  # those that were used


def _is_compiled(part: str) -> bool:
    if part not in _MODULES:
        # Only now: it takes time that commands without a model need not spend.
        _MODULES[part] = importlib.import_module(f"fairseq.kernels.{part}")
    return _MODULES[part].compiled() is not None


# A constant in compiled graphs; torch.compiler.assume_constant_result would load the compiler.
_is_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]
