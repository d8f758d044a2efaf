"""Tensors by name, from a file of elsewhere: checked, and taken one by one."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fairseq.errors import UserError

COMPUTED = ("pos_emb.inv_freq",)  # buffers that hold no knowledge
NAME_LENGTH = 256  # of a tensor's name, at most


class Tensors:
    """A foreign model's tensors by name, taken out one by one, each of the shape that the configuration implies.

    Attributes:
        left: what nobody has taken yet.
    """

    def __init__(self, state: Mapping[str, Tensor], where: str) -> None:
        check_tensors(state, where)
        self.left = {name.removeprefix("module."): value for name, value in state.items()}
        self.where = where

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor *name*, float32.

        Raises:
            UserError: it is missing, has another shape, or holds what is no finite floating-point number.
        """
        if name not in self.left:
            raise UserError(f"{self.where}: the tensor {name} is missing; is this the configuration of that model?")
        value = self.left.pop(name)
        if value.shape != shape:
            raise UserError(
                f"{self.where}: {name} is {list(value.shape)}, but the configuration says {list(shape)}; "
                "give the configuration of that model"
            )
        return self._finite(name, value)

    def _finite(self, name: str, value: Tensor) -> Tensor:
        """*value*, float32; neither whole numbers nor NaN nor infinity can be weights."""
        if not value.is_floating_point():
            raise UserError(
                f"{self.where}: {name} is of {value.dtype}, not of floating-point numbers; use a file of weights"
            )
        value = value.detach().to(torch.float32)
        if value.numel() and not torch.stack(torch.aminmax(value)).isfinite().all():
            raise UserError(
                f"{self.where}: {name} has values that are not a number (NaN) or infinite; "
                "the file is damaged or its training failed, use another one"
            )
        return value

    def tied(self, name: str, to: Tensor) -> Tensor:
        """*to*, after a look at the copy of it that may be stored as *name*.

        Raises:
            UserError: the copy is another tensor.
        """
        if name in self.left and not torch.equal(self.take(name, *to.shape), to):
            raise UserError(f"{self.where}: {name} is tied in the configuration, but has values of its own")
        return to

    def finish(self) -> None:
        """Raises UserError if something was not taken."""
        unknown = [name for name in self.left if name not in COMPUTED]
        if unknown:
            raise UserError(
                f"{self.where}: {len(unknown)} tensors that this configuration has no place for "
                f"({', '.join(unknown[:3])}); give the configuration of that model"
            )


def check_tensors(state: Mapping[str, Tensor], where: str) -> None:
    """Refuse what is no dense tensor by name, or views that would together be much larger than what they show.

    Raises:
        UserError: there is such a one.
    """
    stored: dict[int, int] = {}
    shown: dict[tuple[Any, ...], int] = {}
    for name, value in state.items():
        if not isinstance(name, str) or len(name) > NAME_LENGTH or not name.isprintable():
            raise UserError(f"{where}: {cut(name)} is no tensor's name; give the state dict of a model")
        if not isinstance(value, Tensor):
            raise UserError(f"{where}: {name} is no tensor; give the state dict of a model")
        dense = value.layout == torch.strided and not value.is_nested and not value.is_meta
        if not dense or value.is_quantized or value.is_complex():
            raise UserError(f"{where}: {name} is no plain tensor of numbers; give the state dict of a model")
        memory = value.untyped_storage()
        stored[memory.data_ptr()] = memory.nbytes()
        shown[view(value)] = value.numel() * value.element_size()
    if sum(shown.values()) > 4 * sum(stored.values()):
        raise UserError(f"{where}: its tensors are views of far fewer numbers; give the state dict of a model")


def cut(value: Any) -> str:
    """*value* for a complaint, whatever and however large it is."""
    return reprlib.repr(value)[:80]


def view(value: Tensor) -> tuple[Any, ...]:
    """What is the same only for names of one tensor."""
    return value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride(), value.dtype
