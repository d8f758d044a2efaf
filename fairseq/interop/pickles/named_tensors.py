"""Tensors of foreign files: descriptions, validated before data are read, and checks of names,
shapes and values."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq.errors import UserError

COMPUTED = ("pos_emb.inv_freq",)  # buffers, computed anew


@dataclass(frozen=True)
class Storage:
    """Data of a tensor, stored in the file under *key*."""

    key: str
    dtype: torch.dtype
    count: int

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


class Tensors:
    """A foreign model's tensors by name, removed from *left*
    one by one, each checked against the expected shape."""

    def __init__(self, state: Mapping[str, Tensor], where: str) -> None:
        check_tensors(state, where)
        # `module.` is the prefix of torch's wrappers for several devices, which training scripts
        # save with the model.
        self.left = {name.removeprefix("module."): value for name, value in state.items()}
        self.where = where

    def take(self, name: str, *shape: int) -> Tensor:
        """Remove and return the tensor *name*, float32.

        Raises:
            UserError: it is missing, has another shape,
                or has values other than finite floating-point numbers.
        """
        if name not in self.left:
            raise UserError(f"{self.where}: the tensor {name} is missing; give the configuration of that model")
        value = self.left.pop(name)
        if value.shape != shape:
            raise UserError(
                f"{self.where}: {name} is {list(value.shape)}, but the configuration says {list(shape)}; "
                "give the configuration of that model"
            )
        return self._finite(name, value)

    def _finite(self, name: str, value: Tensor) -> Tensor:
        """*value* as float32; integers, NaN and infinity are rejected."""
        if not value.is_floating_point():
            raise UserError(f"{self.where}: {name} is {value.dtype}, expected floating point; use a file of weights")
        # Files may hold half precision, but checkpoints
        # here hold fp32, which training goes on from.
        value = value.detach().to(torch.float32)
        # Minimum and maximum propagate NaN: one pass, without a mask as large as the tensor.
        if value.numel() and not torch.stack(torch.aminmax(value)).isfinite().all():
            raise UserError(
                f"{self.where}: {name} has NaN or infinite values; "
                "the file is damaged or its training diverged; use another one"
            )
        return value

    def tied(self, name: str, to: Tensor) -> Tensor:
        """Return *to*, after checking the copy of it that may
        be stored as *name*; UserError if that differs."""
        if name in self.left and not torch.equal(self.take(name, *to.shape), to):
            raise UserError(f"{self.where}: {name} is tied in the configuration, but its values differ; correct it")
        return to

    def finish(self) -> None:
        """Raise UserError if tensors are left."""
        unknown = [name for name in self.left if name not in COMPUTED]
        if unknown:
            raise UserError(
                f"{self.where}: {len(unknown)} tensors are not part of this configuration "
                f"({', '.join(unknown[:3])}); give the configuration of that model"
            )


def check_tensors(state: Mapping[str, Tensor], where: str) -> None:
    """Raise UserError unless *state* holds dense tensors by name."""
    for name, value in state.items():
        if not isinstance(name, str) or not name.isprintable():
            raise UserError(f"{where}: invalid tensor name {cut(name)}; give the state dict of a model")
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized:
            raise UserError(f"{where}: {name} is not a dense tensor of real numbers; give the state dict of a model")


def cut(value: object) -> str:
    """Return *value* as short text for an error message."""
    return reprlib.repr(value)[:80]


def view(value: Tensor) -> tuple[object, ...]:
    """Return a key that is equal only for names of one tensor:
    memory, offset, shape, strides, dtype."""
    # Not the storage's address alone: slices of a fused tensor (queries, keys, values) share it and
    # are different tensors.
    return value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride(), value.dtype
