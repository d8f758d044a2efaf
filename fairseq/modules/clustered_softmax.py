"""Transformer-XL's adaptive softmax: biases everywhere, bands as wide as the embeddings',
projections tied or not."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq.modules.adaptive_input import AdaptiveInput
from fairseq.modules.adaptive_softmax import Band, BandedSoftmax


class BandOutput(nn.Module):
    """The words of one band: logits h P Wᵀ + b.

    Args:
        weight: W [n, d], the embeddings' own where the two are tied.
        projection: P [C, d], or None where d is the model's width C.
    """

    def __init__(self, weight: nn.Parameter, projection: nn.Parameter | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = nn.Parameter(torch.zeros(weight.size(0)))
        self.projection = projection

    def narrow(self, hidden: Tensor) -> Tensor:
        """Hidden states [N, C] in the band's width: [N, d]."""
        return hidden if self.projection is None else F.linear(hidden, self.projection.t())


class ClusteredSoftmax(BandedSoftmax):
    """The softmax over one band of words, or the adaptive
    softmax over several, as Dai et al. 2019 have them.

    Args:
        embeddings: the input's, which give each band its width, and, tied, its weights.
        tie_weight: the bands' weights are the embeddings'.
        tie_projections: bands whose projection is the embeddings' too.
    """

    def __init__(self, embeddings: AdaptiveInput, *, tie_weight: bool, tie_projections: Collection[int] = ()) -> None:
        super().__init__(embeddings.bounds, dropout=0.0)
        # Parameters that are not tied are left uninitialised: the decoder draws all its initial
        # values at once.
        self.bands = nn.ModuleList()
        for band in range(len(self.bounds) - 1):
            weight, *projections = embeddings.weights_for_band(band)
            if not tie_weight:
                weight = nn.Parameter(torch.empty_like(weight))
            projection = projections[0] if projections else None
            if projection is not None and band not in tie_projections:
                projection = nn.Parameter(torch.empty_like(projection))
            self.bands.append(BandOutput(weight, projection))
        self.cluster_weight: nn.Parameter | None = None
        self.cluster_bias: nn.Parameter | None = None
        tails = len(self.bands) - 1
        if tails:
            self.cluster_weight = nn.Parameter(torch.empty(tails, embeddings.weights_for_band(0)[0].size(1)))
            self.cluster_bias = nn.Parameter(torch.zeros(tails))

    def _head(self) -> Band:
        first = self.bands[0]
        assert isinstance(first, BandOutput)
        if self.cluster_weight is None or self.cluster_bias is None:
            return _band(first)
        return Band(first.narrow, [first.weight, self.cluster_weight], [first.bias, self.cluster_bias])

    def _tails(self) -> list[Band]:
        return [_band(band) for band in self.bands[1:]]


def _band(output: nn.Module) -> Band:
    assert isinstance(output, BandOutput)
    return Band(output.narrow, [output.weight], [output.bias])
