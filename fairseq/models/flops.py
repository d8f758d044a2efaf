"""Floating-point operations of training per token, from the sizes of a model's parts.

A weight of a matrix product costs 2 operations per token it acts on in the forward pass and 4 in the backward pass
(Kaplan et al. 2020, §2.1). A product of attention with K keys counts as K·H·D such weights, all keys visible
(Chowdhery et al. 2022, appendix B). Keys and values of the memory are computed again in each segment, without a
gradient for the memory. What a model does beyond that, such as recomputed activations, is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from fairseq.models.base import BaseFairseqModel
from fairseq.modules.adaptive_input import AdaptiveInput
from fairseq.modules.adaptive_softmax import AdaptiveSoftmax, TiedLinear
from fairseq.modules.attention import SelfAttention
from fairseq.modules.clustered_softmax import BandOutput, ClusteredSoftmax
from fairseq.modules.output_layer import OutputLayer
from fairseq.modules.relative_attention import DistanceAttention, RelativeAttention

OPERATIONS = 6  # per weight and token: 2 forward, 4 backward
MEMORY_OPERATIONS = 4  # backward only for the weight


@dataclass(frozen=True)
class Reading:
    """What a model reads and predicts in training.

    Attributes:
        segment: tokens of a row.
        memory: tokens of its memory.
        predicted: share of the tokens with a prediction, less than 1 in masked language models.
        counts: occurrences of each symbol, [V]; bands of words cost as much as they are used.
    """

    segment: int
    memory: int
    predicted: float
    counts: np.ndarray

    def shares(self, bounds: Sequence[int]) -> list[float]:
        """The share of each band among all words; *bounds* are its first words and V."""
        used = [float(self.counts[first:last].sum()) for first, last in zip(bounds, bounds[1:], strict=False)]
        return [part / sum(used) if sum(used) else 1.0 for part in used]


def flops_per_token(model: BaseFairseqModel, reading: Reading) -> float:
    """Return the operations of one token in the forward and backward pass of *model*."""
    output = model.output_layer
    # Masked language models compute logits of the chosen tokens alone.
    predicting = reading.predicted * _output_weights(output, reading) if output is not None else 0.0
    return OPERATIONS * (_weights(model, reading) + predicting)


def _weights(module: nn.Module, reading: Reading) -> float:
    """The weights that act on a token in *module*, apart from output layers, which :func:`flops_per_token` counts."""
    if isinstance(module, OutputLayer):
        return 0.0
    if isinstance(module, nn.Linear | TiedLinear):
        return module.weight.numel()
    if isinstance(module, nn.LSTMCell):
        return module.weight_ih.numel() + module.weight_hh.numel()
    if isinstance(module, BandOutput):
        return module.weight.numel() + (0 if module.projection is None else module.projection.numel())
    if isinstance(module, AdaptiveInput):
        bands = zip(module.embeddings, reading.shares(module.bounds), strict=True)
        return sum(share * _weights(band, reading) for band, share in bands)
    parts = sum(_weights(part, reading) for part in module.children())
    return parts + _attending(module, reading) if isinstance(module, SelfAttention) else parts


def _attending(module: SelfAttention, reading: Reading) -> float:
    """The weights that the products of attention count as, and what memory and distances add to its projections."""
    products = 3 if isinstance(module, DistanceAttention) else 2  # scores, sums of values; scores of distances
    attending = products * (reading.segment + reading.memory) * module.num_heads * module.head_dim
    # Each segment projects its memory anew: M / T remembered tokens for each of its own.
    remembered = (module.k_proj.weight.numel() + module.v_proj.weight.numel()) * reading.memory / reading.segment
    # W_R projects the distances of a segment once, whatever the number of rows.
    unused = module.r_proj.weight.numel() if isinstance(module, RelativeAttention) else 0  # acts on distances
    return attending + remembered * MEMORY_OPERATIONS / OPERATIONS - unused


def _output_weights(layer: nn.Module, reading: Reading) -> float:
    """The weights that act on a token whose target *layer* predicts."""
    if isinstance(layer, AdaptiveSoftmax):
        head, tails = _weights(layer.head, reading), [_weights(band, reading) for band in layer.tail]
    elif isinstance(layer, ClusteredSoftmax):
        head, *tails = [_weights(band, reading) for band in layer.bands]
        head += 0 if layer.cluster_weight is None else layer.cluster_weight.numel()
    else:
        # The projection to all words, shared with the embeddings or not, and what is before it.
        weight = getattr(layer, "weight", None)
        parts = sum(_weights(part, reading) for part in layer.children())
        return parts + (0 if weight is None else weight.numel())
    _, *shares = reading.shares(layer.bounds)
    return head + sum(share * size for share, size in zip(shares, tails, strict=True))
