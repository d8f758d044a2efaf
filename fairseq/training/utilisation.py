"""Model FLOPs utilisation: the share of a device's peak speed
that training needs (Chowdhery et al. 2022, §4.1).

A weight of a matrix product costs 2 operations per token it acts on in the forward pass and 4 in
the backward pass (Kaplan et al. 2020, §2.1). A product of attention with K keys counts as K·H·D
such weights, all keys visible (Chowdhery et al. 2022, appendix B). Keys and values of the memory
are computed again in each segment, without a gradient for the memory. What a model does beyond
that, such as recomputed activations, is left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from fairseq.config.settings import CommonConfig
from fairseq.modules import devices
from fairseq.modules.adaptive_input import AdaptiveInput
from fairseq.modules.adaptive_softmax import AdaptiveSoftmax, TiedLinear
from fairseq.modules.attention import SelfAttention
from fairseq.modules.clustered_softmax import BandOutput, ClusteredSoftmax
from fairseq.modules.output_layer import OutputLayer
from fairseq.modules.relative_attention import DistanceAttention, RelativeAttention
from fairseq.tasks.settings import MaskedLMTaskConfig
from fairseq.training.state import TrainingState

OPERATIONS = 6  # per weight and token: 2 forward, 4 backward
MEMORY_OPERATIONS = 4  # backward only for the weight
# Of dense products: data sheets also print twice as much, for 2:4 sparsity.
PRECISIONS = ("bf16", "fp16", "tf32", "fp32")
PEAKS: dict[str, tuple[float | None, ...]] = {
    # Name of the device: dense TFLOP/s by PRECISIONS,
    # from the vendors' data sheets; None: not supported.
    r"NVIDIA (H200|GH200|H100|H800)(?!.*(PCIe|NVL)).*": (989.4, 989.4, 494.7, 66.9),
    r"NVIDIA H(100|800) PCIe": (756, 756, 378, 51.2),
    r"(NVIDIA )?A(100|800)-.*": (312, 312, 156, 19.5),
    r"NVIDIA A100 .*": (312, 312, 156, 19.5),
    r"NVIDIA A40": (149.7, 149.7, 74.8, 37.4),
    r"NVIDIA A10": (125, 125, 62.5, 31.2),
    r"NVIDIA L4": (121, 121, 60, 30.3),
    r"NVIDIA L40S": (362, 362, 183, 91.6),
    r"(NVIDIA |Tesla )*V100-SXM2.*": (None, 125, None, 15.7),
    r"(NVIDIA |Tesla )*V100-PCIE.*": (None, 112, None, 14),
    r"(NVIDIA |Tesla )*T4": (None, 65, None, 8.1),
}


def peak_flops(device: str, precision: str) -> float | None:
    """Return the operations per second of dense matrix products; None if not known, as for a part
    of a GPU (MIG).

    *device* is the name that ``devices.name`` returns, *precision* one of :data:`PRECISIONS`.
    """
    # A part of a GPU reports the name of the whole one, with MIG in it.
    for pattern, peaks in PEAKS.items():
        if re.fullmatch(pattern, device) and "MIG" not in device:
            peak = peaks[PRECISIONS.index(precision)]
            return None if peak is None else peak * 1e12
    return None


def matrix_precision(common: CommonConfig) -> str:
    """Return the precision of matrix products."""
    if common.bf16:
        return "bf16"
    if common.fp16 or common.memory_efficient_fp16:
        return "fp16"
    return "tf32" if common.tf32 else "fp32"


def token_flops(state: TrainingState) -> float | None:
    """Return the operations of one token of the run
    in the forward and backward pass; rows count as full.

    None for models without an output layer over words.
    """
    length, output = state.task.batch_settings().get("tokens_per_sample"), state.model.output_layer
    if length is None or output is None:
        return None
    settings = state.task.settings.task
    reading = Reading(
        segment=length,
        memory=state.model.memory_length,
        predicted=settings.mask_prob if isinstance(settings, MaskedLMTaskConfig) else 1.0,
        counts=np.array(state.task.source_dictionary.count),
    )
    # Masked language models compute logits of the chosen tokens alone.
    predicting = reading.predicted * _output_weights(output, reading)
    return OPERATIONS * (_weights(state.model, reading) + predicting)


def token_share(state: TrainingState) -> float | None:
    """Return the percentage of the devices' peak that one
    token per second needs; None where it is not known."""
    device, common = state.world.device, state.task.settings.common
    on_gpu = devices.is_accelerator(device)
    peak = peak_flops(devices.name(device), matrix_precision(common)) if on_gpu else None
    flops = token_flops(state) if peak is not None else None
    return None if peak is None or flops is None else 100 * flops / (peak * state.world.size)


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


def _weights(module: nn.Module, reading: Reading) -> float:
    """The weights that act on a token in *module*, apart from output layers, which
    :func:`token_flops` counts."""
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
    """The weights that the products of attention count as,
    and what memory and distances add to its projections."""
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
