"""Tensors in a file, described before they are read, and only as far as they can be."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

DIMENSIONS = 64  # of a tensor, at most: PyTorch's limit


@dataclass(frozen=True)
class Storage:
    """The numbers of a tensor, which lie elsewhere in the file under *key*."""

    key: str
    dtype: torch.dtype
    count: int

    def __post_init__(self) -> None:
        if not isinstance(self.key, str) or type(self.count) is not int or not 0 <= self.count < 1 << 63:
            raise ValueError("a tensor of impossible size")

    @property
    def nbytes(self) -> int:
        """How many bytes they take."""
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class Stored:
    """A tensor whose numbers are not read yet; equal ones are one tensor."""

    storage: Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def __post_init__(self) -> None:
        numbers = (self.offset, *self.size, *self.stride)
        fine = all(type(n) is int and 0 <= n < 1 << 63 for n in numbers)
        if not fine or not len(self.size) == len(self.stride) <= DIMENSIONS:
            raise ValueError("a tensor of impossible shape")
        end = self.offset
        if 0 not in self.size:
            end += 1 + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        if max(math.prod(self.size), end) > self.storage.count:
            raise ValueError("a tensor larger than what is stored of it")
