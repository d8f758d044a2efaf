"""Output layers: the interface, and the plain softmax."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq.modules.linear_cross_entropy import linear_cross_entropy, target_log_probs


class OutputLayer(nn.Module):
    """The distribution over words, with three entry points that avoid materialising unused logits.

    A *partition* is the part of the loss that depends on the targets alone. It is made on the host, so that the loss
    needs no synchronisation with the device.
    """

    def partition(self, target: Tensor, padding_idx: int, band_padding: bool = False) -> Any:
        """Return the rows that have a target, and the band of each; *target* [N] is on the CPU."""
        raise NotImplementedError

    def loss(self, hidden: Tensor, partition: Any) -> Tensor:
        """Summed negative log-likelihood (natural log) of the targets that *partition* was made of; hidden [N, C]."""
        raise NotImplementedError

    def target_log_probs(self, hidden: Tensor, target: Tensor, chunk: int | None = None) -> Tensor:
        """Log-probability of each target: hidden [N, C], target [N], best on the CPU → [N]. No gradient."""
        raise NotImplementedError

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Log-probabilities of all words: hidden [..., C] → [..., V]."""
        raise NotImplementedError


class LinearOutput(OutputLayer):
    """The plain softmax over one weight [V, C], which may be the embeddings' own, and a bias [V] or none."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias

    def partition(self, target: Tensor, padding_idx: int, band_padding: bool = False) -> tuple[Tensor | None, Tensor]:
        """Rows to keep (None: all of them) and their targets."""
        keep = target != padding_idx
        if bool(keep.all()):
            return None, target
        rows = keep.nonzero().squeeze(1)
        return rows, target[rows]

    def loss(self, hidden: Tensor, partition: tuple[Tensor | None, Tensor]) -> Tensor:
        rows, target = partition
        return linear_cross_entropy(hidden if rows is None else hidden[rows], self.weight, target, self.bias)

    def target_log_probs(self, hidden: Tensor, target: Tensor, chunk: int | None = None) -> Tensor:
        target = target.to(hidden.device, non_blocking=True)
        return target_log_probs(hidden, self._logits, self.weight.size(0), target, chunk)

    def log_probs(self, hidden: Tensor) -> Tensor:
        return self._logits(hidden).float().log_softmax(-1)

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)


def move_partition(partition: Any, device: torch.device) -> Any:
    """*partition* with its tensors on *device*, copied without waiting."""
    if isinstance(partition, Tensor):
        if device.type == "cuda" and not partition.is_cuda:
            partition = partition.pin_memory()
        return partition.to(device, non_blocking=True)
    if isinstance(partition, tuple | list):
        return type(partition)(move_partition(part, device) for part in partition)
    return partition
