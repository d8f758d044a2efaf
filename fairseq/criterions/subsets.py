"""Validation losses over subsets of tokens, which a task names and marks in its samples, and of single tokens.

``sample["subsets"]`` holds a mask for each of the task's ``subsets``, bool [B, T] or broadcastable to it;
``sample["positions"]``, where there is one, the position of each target in the corpus, int64 [B, T], −1 for none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fairseq.criterions.fairseq_criterion import Sample
from fairseq.logging.figures import Figure, Gathered, ratio
from fairseq.modules.output_layer import OutputLayer, move_partition

TOKEN_LOSSES = "token losses"
"""Name of gathered rows (position in the corpus, loss in nats), float64 [n, 2]."""


def subset_sums(layer: OutputLayer, hidden: Tensor, sample: Sample, padding_idx: int) -> dict[str, Any]:
    """Summed losses and numbers of the targets of each subset, for hidden states [N, C] of all tokens."""
    sums: dict[str, Any] = {}
    if "positions" in sample:
        target = sample["target"].reshape(-1)
        # This synchronises, in validation only.
        rows = (target != padding_idx).nonzero().squeeze(1)
        sums[TOKEN_LOSSES] = _gathered(sample, rows, -layer.target_log_probs(hidden[rows], target[rows]))
    for name, mask in sample.get("subsets", {}).items():
        target = sample["target"].masked_fill(~mask, padding_idx).reshape(-1)
        count = int((target != padding_idx).sum())
        partition = move_partition(layer.partition(target, padding_idx), hidden.device)
        sums |= {f"{name}_loss": layer.loss(hidden, partition) if count else 0.0, f"{name}_targets": count}
    return sums


def subset_sums_of(losses: Tensor, real: Tensor, sample: Sample) -> dict[str, Any]:
    """The sums of :func:`subset_sums` from all tokens' losses [B, T]; *real*, bool [B, T], is false at padding."""
    sums: dict[str, Any] = {}
    if "positions" in sample:
        rows = real.reshape(-1).nonzero().squeeze(1)
        sums[TOKEN_LOSSES] = _gathered(sample, rows, losses.reshape(-1)[rows])
    for name, mask in sample.get("subsets", {}).items():
        sums |= {f"{name}_loss": (losses * (real & mask)).sum(), f"{name}_targets": (real & mask).sum()}
    return sums


def _gathered(sample: Sample, rows: Tensor, losses: Tensor) -> Gathered:
    """The *losses* [n] of the targets *rows* [n] of *sample*, with their positions."""
    # float64 holds positions up to 2**53 exactly, so that position and loss are gathered as one tensor.
    return Gathered(torch.stack([sample["positions"].reshape(-1)[rows].double(), losses.double()], 1))


def subset_figures(names: Iterable[str]) -> dict[str, Figure]:
    """``NAME_loss`` of each subset, in bits a token; NaN where it has none."""
    return {f"{name}_loss": ratio(f"{name}_loss", f"{name}_targets", 1 / math.log(2)) for name in names}
