"""Descriptions of tensors in a file, validated before the data are read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

DIMENSIONS = 64  # most dimensions of a tensor, PyTorch's limit


@dataclass(frozen=True)
class Storage:
    """Data of a tensor, stored in the file under *key*."""

    key: str
    dtype: torch.dtype
    count: int

    def __post_init__(self) -> None:
        # `type(…) is int`, not `isinstance`: True is an `int`, too, and would pass as the size 1.
        if not isinstance(self.key, str) or type(self.count) is not int or not 0 <= self.count < 1 << 63:
            raise ValueError("invalid tensor size")

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class Stored:
    """A tensor whose data are not read yet; equal values describe one tensor."""

    storage: Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def __post_init__(self) -> None:
        numbers = (self.offset, *self.size, *self.stride)
        fine = all(type(n) is int and 0 <= n < 1 << 63 for n in numbers)
        if not fine or not len(self.size) == len(self.stride) <= DIMENSIONS:
            raise ValueError("invalid tensor shape")
        # The product of the sizes is compared as well as the last element: strides of 0 would let a tensor of any size
        # lie in one number.
        end = self.offset
        if 0 not in self.size:
            end += 1 + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        if max(math.prod(self.size), end) > self.storage.count:
            raise ValueError("tensor larger than its storage")
