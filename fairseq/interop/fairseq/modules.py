"""The names of ``fairseq.modules`` that plug-ins import, with fairseq's constructors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fairseq.modules import adaptive_input, adaptive_softmax
from fairseq.modules.dropout import dropout
from fairseq.modules.transformer_layer import layer_norm


class AdaptiveInput(adaptive_input.AdaptiveInput):
    """Adaptive input embeddings; quantisation noise is not implemented and ignored at 0."""

    def __init__(
        self,
        vocab_size: int,
        padding_idx: int,
        initial_dim: int,
        factor: float,
        output_dim: int,
        cutoff: list[int],
        q_noise: float = 0,
        qn_block_size: int = 8,
    ) -> None:
        if q_noise:
            raise NotImplementedError("AdaptiveInput: quantisation noise is not implemented; use q_noise=0")
        super().__init__(vocab_size, padding_idx, initial_dim, factor, output_dim, cutoff)


class AdaptiveSoftmax(adaptive_softmax.AdaptiveSoftmax):
    """An adaptive softmax that is called for the logits of every band, as fairseq's ``adaptive_loss`` does."""

    def __init__(
        self,
        vocab_size: int,
        input_dim: int,
        cutoff: list[int],
        dropout: float,
        factor: float = 4.0,
        adaptive_inputs: Any = None,
        tie_proj: bool = False,
    ) -> None:
        super().__init__(
            vocab_size,
            input_dim,
            cutoff,
            dropout=dropout,
            factor=factor,
            adaptive_inputs=adaptive_inputs,
            tie_proj=tie_proj,
        )


class FairseqDropout(nn.Module):
    """Dropout in training."""

    def __init__(self, p: float, module_name: str | None = None) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor, inplace: bool = False) -> Tensor:
        return dropout(x, self.p, self.training)


def LayerNorm(
    normalized_shape: int, eps: float = 1e-5, elementwise_affine: bool = True, export: bool = False
) -> nn.Module:
    """A layer norm; NVIDIA apex's where it is installed, as in this package's models."""
    if eps == 1e-5 and elementwise_affine and not export:
        return layer_norm(normalized_shape)
    return torch.nn.LayerNorm(normalized_shape, eps, elementwise_affine)
