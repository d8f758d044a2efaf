"""Output layers of encoders: words, replaced tokens, classes of sentences."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq.models.encoder import INIT_STD, BertConfig, initialize
from fairseq.modules.dropout import dropout
from fairseq.modules.linear import Linear, linear
from fairseq.modules.output_layer import OutputLayer, linear_cross_entropy, select_rows, target_log_probs
from fairseq.modules.transformer_layer import activation, layer_norm

Masked = tuple[Tensor, Tensor]
"""Indices of the chosen tokens in the B·T tokens of a batch, int64 [M], and their targets, int64 [M]."""


class MaskedLMHead(OutputLayer):
    """Dense layer, activation, layer norm, and a projection to all words with a bias (Devlin et al. 2019, §3.1).

    Args:
        cfg: settings of the encoder, whose hidden states have C channels.
        weight: of the projection, [V, E]; usually the token embeddings.
    """

    def __init__(self, cfg: BertConfig, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.bias = nn.Parameter(torch.zeros(weight.size(0)))
        self.dense = Linear(cfg.encoder_embed_dim, weight.size(1))
        self.layer_norm = layer_norm(weight.size(1), not cfg.no_apex, cfg.layer_norm_eps)
        self.activation = activation(cfg.head_activation)
        # The projection is the embeddings', which have their initial values already.
        initialize(self.dense, cfg.init_std)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits: [..., C] → [..., V]."""
        return self._logits(self._transform(hidden))

    def partition(self, target: Tensor, padding_idx: int, band_padding: bool = False) -> Masked:
        """Indices of *target* [N] that are not padding, and the targets there."""
        rows = (target != padding_idx).nonzero().squeeze(1)
        return rows, target[rows]

    def loss(self, hidden: Tensor, partition: Masked) -> Tensor:
        """Summed loss; only the rows of *partition* pass through the layers, with logits computed in chunks."""
        rows, target = partition
        # Selected before the dense layer, which would otherwise run on the 85 % of tokens without a target.
        transformed = self._transform(select_rows(hidden, rows))  # (≥ M, E)
        return linear_cross_entropy(transformed, self.weight, target, self.bias)

    def target_log_probs(self, hidden: Tensor, target: Tensor, chunk: int | None = None) -> Tensor:
        target = target.to(hidden.device, non_blocking=True)
        return target_log_probs(self._transform(hidden), self._logits, self.weight.size(0), target, chunk)

    def log_probs(self, hidden: Tensor) -> Tensor:
        return self(hidden).float().log_softmax(-1)

    def _transform(self, hidden: Tensor) -> Tensor:
        return self.layer_norm(self.activation(self.dense(hidden)))

    def _logits(self, transformed: Tensor) -> Tensor:
        return linear(transformed, self.weight, self.bias)


class DiscriminatorHead(nn.Module):
    """Head that detects replaced tokens: dense layer, activation, one logit a token (Clark et al. 2020, §2)."""

    def __init__(self, dim: int, activation_fn: str, init_std: float = INIT_STD) -> None:
        super().__init__()
        self.dense = Linear(dim, dim)
        self.out_proj = Linear(dim, 1)
        self.activation = activation(activation_fn)
        initialize(self, init_std)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits of "replaced": [..., C] → [...]."""
        return self.out_proj(self.activation(self.dense(hidden))).squeeze(-1)


class ClassificationHead(nn.Module):
    """Dropout, dense layer, activation, dropout, projection to n classes (Devlin et al. 2019, §3.2)."""

    def __init__(self, dim: int, outputs: int, dropout: float = 0.0, activation_fn: str = "tanh") -> None:
        super().__init__()
        self.dense = Linear(dim, dim)
        self.out_proj = Linear(dim, outputs)
        self.activation = activation(activation_fn)
        self.dropout = dropout
        initialize(self)

    def forward(self, first: Tensor) -> Tensor:
        """Logits from the hidden states of the rows' first tokens: [B, C] → [B, n]."""
        x = self.activation(self.dense(dropout(first, self.dropout, self.training)))
        return self.out_proj(dropout(x, self.dropout, self.training))
