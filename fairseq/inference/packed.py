"""The decoding kernels, and packed weights for them: panels of outputs, in one of four types."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq.kernels import build

SOURCE = Path(build.__file__).with_name("decoding.c")
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}


def decoding_kernels() -> ctypes.CDLL | None:
    """The compiled kernels; None, with a warning, if they cannot be compiled."""
    return build.library("decoding", SOURCE, _declare)


def _declare(compiled: ctypes.CDLL) -> None:
    address, number = ctypes.c_void_p, ctypes.c_long
    compiled.steps.argtypes = (address, address, address, number, address, number, address)
    compiled.linear.argtypes = (address, address, number, address, number, address)
    compiled.embed.argtypes = (address, address, number, address, address, number, address)
    compiled.best.argtypes = (address, address, number, number, address, number, address, address, number, address)
    compiled.scratch_size.argtypes = (address, address, number)
    compiled.best_size.argtypes = (address, number, number)
    # ctypes takes results for C's int, which would cut sizes of 64 bits.
    compiled.scratch_size.restype = compiled.best_size.restype = compiled.lanes.restype = number


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
    scale, compiled = None, decoding_kernels()
    assert compiled is not None, "weights are packed for the kernels alone"
    lanes = compiled.lanes()  # numbers of a register: a panel's outputs
    weight = weight.detach()
    outputs, inputs = weight.shape
    if int8:
        weight, scale = quantize(weight)
    # Outputs filled with zeros to full panels: the kernels have no code for a rest.
    weight = F.pad(weight, (0, 0, 0, -outputs % lanes))
    if weight.dtype == torch.bfloat16:  # in pairs along K
        weight = F.pad(weight, (0, inputs % 2)).unflatten(1, (-1, 2))
        packed = weight.unflatten(0, (-1, lanes)).transpose(1, 2).contiguous()  # (N / L, K / 2, L, 2)
    else:
        # The outputs of a panel lie side by side: one vector load feeds a multiplication with
        # one broadcast input.
        packed = weight.unflatten(0, (-1, lanes)).transpose(1, 2).contiguous()  # (N / L, K, L)
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
