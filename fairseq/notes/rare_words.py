"""Validation losses on rare words, and on rows with and without them.

They are computed for samples with ``rare``, bool [B, T], the targets of rare words: in tasks with notes.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from fairseq.criterions.fairseq_criterion import Sample
from fairseq.logging.figures import SIZE, Figure
from fairseq.modules.output_layer import OutputLayer, move_partition

Parts = dict[str, tuple[Any, int]]
"""Targets of a loss, partitioned by the output layer, and their number, by name."""


def rare_parts(layer: OutputLayer, sample: Sample, padding_idx: int) -> Parts:
    """The targets of rare words (``rare``), and all targets of rows with rare words (``near``)."""
    target, rare = sample["target"], sample["rare"]
    marks = {"rare": rare, "near": rare.any(1, keepdim=True).expand_as(rare)}
    chosen = {name: target.masked_fill(~mark, padding_idx).reshape(-1) for name, mark in marks.items()}
    return {name: (layer.partition(one, padding_idx), int((one != padding_idx).sum())) for name, one in chosen.items()}


def rare_sums(layer: OutputLayer, hidden: Tensor, parts: Parts) -> dict[str, Any]:
    """Summed losses and numbers of targets of *parts*, for hidden states [N, C]."""
    sums: dict[str, Any] = {}
    for name, (partition, count) in parts.items():
        loss = layer.loss(hidden, move_partition(partition, hidden.device)) if count else 0.0
        sums |= {f"{name}_loss": loss, f"{name}_targets": count}
    return sums


def rare_token_sums(losses: Tensor, real: Tensor, rare: Tensor) -> dict[str, Any]:
    """The sums of :func:`rare_sums` from the losses of all tokens [B, T]; *real*, bool [B, T], is false at padding."""
    sums: dict[str, Any] = {}
    for name, mark in {"rare": rare, "near": rare.any(1, keepdim=True)}.items():
        sums |= {f"{name}_loss": (losses * (real & mark)).sum(), f"{name}_targets": (real & mark).sum()}
    return sums


def rare_figures(total: str = "loss", count: str = SIZE) -> dict[str, Figure]:
    """``rare_loss`` over rare words, ``near_loss`` over rows with some and ``far_loss`` over the other rows, in bits.

    A figure is NaN where there is nothing to average, such as ``far_loss`` where every row has rare words.

    Args:
        total: name of the summed loss over all targets.
        count: name of their number.
    """

    def far(sums: Any) -> float:
        return _bits(sums[total] - sums["near_loss"], sums[count] - sums["near_targets"])

    return {
        "rare_loss": Figure(lambda sums: _bits(sums["rare_loss"], sums["rare_targets"]), ("rare_loss", "rare_targets")),
        "near_loss": Figure(lambda sums: _bits(sums["near_loss"], sums["near_targets"]), ("near_loss", "near_targets")),
        "far_loss": Figure(far, (total, count, "near_loss", "near_targets")),
    }


def _bits(loss: float, targets: float) -> float:
    return loss / targets / math.log(2) if targets > 0 else math.nan
