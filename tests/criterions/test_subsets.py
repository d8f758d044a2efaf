"""Losses over subsets of tokens are means over the tokens that a mask names, whatever the subset
is."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fairseq.criterions.fairseq_criterion import subset_figures, subset_sums, subset_sums_of
from fairseq.modules.output_layer import LinearOutput

PAD = 1


def test_subsets_of_tokens_and_of_rows_have_the_mean_loss_of_their_targets():
    torch.manual_seed(2)
    layer, hidden = LinearOutput(torch.randn(11, 4)), torch.randn(3, 5, 4)
    target = torch.randint(2, 11, (3, 5))
    target[1, 3:] = PAD
    masks = {"odd": target % 2 == 1, "last": torch.tensor([[False], [False], [True]]), "none": target < 0}
    sample = {"target": target, "subsets": masks}
    sums = subset_sums(layer, hidden.flatten(0, 1), sample, PAD)
    logits = hidden @ layer.weight.T  # (B, T, V)
    losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(3, 5)
    of_all = subset_sums_of(losses, target != PAD, sample)
    for name, mask in masks.items():
        chosen = losses[mask.expand_as(target) & (target != PAD)]
        expected = float(chosen.mean()) / math.log(2) if len(chosen) else math.nan
        for found in (sums, of_all):
            figure = subset_figures(masks)[f"{name}_loss"].compute({key: float(value) for key, value in found.items()})
            assert figure == pytest.approx(expected, rel=1e-5, nan_ok=True), name


def test_a_sample_without_subsets_has_no_sums():
    sample = {"target": torch.zeros(1, 1, dtype=torch.int64)}
    assert subset_sums(LinearOutput(torch.zeros(2, 2)), torch.zeros(1, 2), sample, PAD) == {}
