"""Packed weights for the decoding kernels: panels of 16 outputs, in one of four types."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# float32 numbers of a register of AVX-512, or of two of AVX2.
LANES = 16
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}


def longs(*names: str) -> list[tuple[str, Any]]:
    """Fields of a structure of type ``long``."""
    return [(name, ctypes.c_long) for name in names]


def pointers(*names: str) -> list[tuple[str, Any]]:
    """Fields of a structure that are addresses."""
    return [(name, ctypes.c_void_p) for name in names]


class Matrix(ctypes.Structure):
    """A linear map x Wᵀ + b, ``Matrix`` of decoding.h.

    Attributes:
        tensors: packed weight, scale and bias, kept alive: the structure holds their addresses.
    """

    _fields_ = [*longs("type", "outputs", "inputs"), *pointers("weight", "scale", "bias")]
    tensors: tuple[Tensor | None, ...] = ()


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Int8 values and a float32 scale for each row:
    [N, K] → [N, K], [N]. Symmetric, rounded to nearest."""
    weight = weight.float()
    scale = weight.abs().amax(1) / 127
    # A row of zeros may have any scale but 0, by which it would be divided.
    steps = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (weight / steps[:, None]).round_().to(torch.int8), steps


def dequantized(weight: Tensor) -> Tensor:
    """*weight* [N, K] rounded to int8 precision, in its own type."""
    values, scale = quantize(weight)
    return (values.float() * scale[:, None]).to(weight.dtype)


def pack(weight: Tensor, bias: Tensor | None = None, *, int8: bool = False) -> Matrix:
    """Pack a weight [N, K], in its own type or int8, and a bias [N]."""
    scale = None
    weight = weight.detach()
    outputs, inputs = weight.shape
    if int8:
        weight, scale = quantize(weight)
    # Outputs filled with zeros to full panels: the kernels have no code for a rest.
    weight = F.pad(weight, (0, 0, 0, -outputs % LANES))
    if weight.dtype == torch.bfloat16:  # in pairs along K
        weight = F.pad(weight, (0, inputs % 2)).unflatten(1, (-1, 2))
        packed = weight.unflatten(0, (-1, LANES)).transpose(1, 2).contiguous()  # (N / 16, K / 2, 16, 2)
    else:
        # The 16 outputs of a panel lie side by side: one vector load feeds a multiplication with
        # one broadcast input.
        packed = weight.unflatten(0, (-1, LANES)).transpose(1, 2).contiguous()  # (N / 16, K, 16)
    bias = None if bias is None else floats(bias)
    matrix = Matrix(TYPES[packed.dtype], outputs, inputs, *map(pointer, (packed, scale, bias)))
    matrix.tensors = packed, scale, bias
    return matrix


NOTHING = Matrix()


def floats(tensor: Tensor) -> Tensor:
    """*tensor* as contiguous float32."""
    return tensor.detach().float().contiguous()


def pointer(tensor: Tensor | None) -> int | None:
    """The address of *tensor*'s first element; None for None."""
    return None if tensor is None else tensor.data_ptr()
