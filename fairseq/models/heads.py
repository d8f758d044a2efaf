"""Output layers of encoders: words, replaced tokens, classes of sentences."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fairseq.models.encoder import INIT_STD, BertConfig, initialize
from fairseq.modules.dropout import dropout
from fairseq.modules.linear import Linear
from fairseq.modules.output_layer import LinearOutput
from fairseq.modules.transformer_layer import activation, layer_norm


class MaskedLMHead(LinearOutput):
    """Dense layer, activation, layer norm, and a projection to all words with a bias (Devlin et al. 2019, §3.1).

    The *weight* of the projection, [V, E], is usually the token embeddings'.
    """

    def __init__(self, cfg: BertConfig, weight: nn.Parameter) -> None:
        super().__init__(weight, nn.Parameter(torch.zeros(weight.size(0))))
        self.dense = Linear(cfg.encoder_embed_dim, weight.size(1))
        self.layer_norm = layer_norm(weight.size(1), not cfg.no_apex, cfg.layer_norm_eps)
        self.activation = activation(cfg.head_activation)
        # The projection is the embeddings', which have their initial values already.
        initialize(self.dense, cfg.init_std)

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits: [..., C] → [..., V]."""
        return self._logits(self._transform(hidden))

    def _transform(self, hidden: Tensor) -> Tensor:
        return self.layer_norm(self.activation(self.dense(hidden)))


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
