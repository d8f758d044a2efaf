"""Visibility: which keys each query of an attention may read, as a value that a model hands to its layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from fairseq.modules.cached_tensor import cached_tensor


class Visibility(ABC):
    """The keys that each of T queries reads, of S; those of a memory come first."""

    @abstractmethod
    def mask(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """True where a query reads a key: bool, broadcastable to [B, H, T, S]; None: every query reads every key."""

    @abstractmethod
    def bias(self, queries: int, keys: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """The mask as an additive bias, 0 or −∞, of the same shape; None: every query reads every key."""


@dataclass(frozen=True)
class Causal(Visibility):
    """Each query reads its own position and those before it; the last query stands at the last key.

    Attributes:
        window: positions a query reads, its own included; None: all before it.
    """

    window: int | None = None

    def reach(self, queries: int, keys: int) -> int:
        """Number of the last keys that any of the queries reads."""
        return keys if self.window is None else min(keys, self.window + queries - 1)

    def mask(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """See :meth:`Visibility.mask`; shape [T, S]."""
        if queries == 1 and self.reach(1, keys) == keys:
            return None
        return _causal_mask(queries, keys, self.window, device)

    def bias(self, queries: int, keys: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """See :meth:`Visibility.bias`; shape [T, S]."""
        if queries == 1 and self.reach(1, keys) == keys:
            return None
        return _causal_bias(queries, keys, self.window, device, dtype)


@dataclass(frozen=True, eq=False)
class Bidirectional(Visibility):
    """Each query reads every key of its row that is not padding.

    A row of padding only reads all of itself: its output is unused, and a softmax over no keys would be NaN.

    Attributes:
        padding: bool [B, S], True at padding; None: no row has any.
    """

    padding: Tensor | None = None

    def mask(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """See :meth:`Visibility.mask`; shape [B, 1, 1, S]."""
        if self.padding is None:
            return None
        return (~self.padding | self.padding.all(dim=1, keepdim=True))[:, None, None]

    def bias(self, queries: int, keys: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor | None:
        """See :meth:`Visibility.bias`; shape [B, 1, 1, S]."""
        mask = self.mask(queries, keys, device)
        return None if mask is None else _as_bias(mask, dtype)


CAUSAL = Causal()


@cached_tensor(8)
def _causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)  # (T, S)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


@cached_tensor(8)
def _causal_bias(
    queries: int, keys: int, window: int | None, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    return _as_bias(_causal_mask(queries, keys, window, device), dtype)


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, float("-inf"))
