"""Bidirectional transformer encoder: embeddings and layers with full attention over each row."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fairseq.modules.attention import Bidirectional, SelfAttention
from fairseq.modules.dropout import dropout
from fairseq.modules.linear import Linear
from fairseq.modules.transformer_layer import Infuse, TransformerLayer, layer_norm

INIT_STD = 0.02  # of all weights, as in the code of BERT's authors (Devlin et al. 2019, appendix A.2)


@dataclass(frozen=True)
class EncoderShape:
    """Sizes and rates of a :class:`TransformerEncoder`.

    Attributes:
        vocabulary: symbols V.
        padding_idx: id of the padding symbol.
        embed_dim: width E of the embeddings; projected to *dim* where the two differ.
        dim: channels C of the layers.
        max_positions: most tokens of a row.
        token_types: kinds of tokens with an embedding each (first or second sentence); 0: none.
        layer_norm_eps: added to the variance in every layer norm.
        apex: whether apex's fused layer norm is allowed.
        init_std: standard deviation of all initial weights.
        layerdrop: probability of skipping a layer in training (Fan et al. 2020).
    """

    vocabulary: int
    padding_idx: int
    embed_dim: int
    dim: int
    ffn_dim: int
    layers: int
    heads: int
    max_positions: int
    token_types: int = 0
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    activation_fn: str = "gelu"
    head_activation_fn: str = "gelu"
    layer_norm_eps: float = 1e-5
    apex: bool = True
    init_std: float = INIT_STD
    layerdrop: float = 0.0


class TransformerEncoder(nn.Module):
    """Token, position and token-type embeddings, a layer norm, and post-norm layers (Devlin et al. 2019, §3).

    Parameters are named as in fairseq's RoBERTa. Positions are learned and numbered from ``padding_idx + 1``, padding
    not counted.

    Args:
        shape: sizes and rates.
        embeddings: another encoder of the same *embed_dim*, whose embeddings and layer norm are shared.
    """

    def __init__(self, shape: EncoderShape, embeddings: TransformerEncoder | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.padding_idx = shape.padding_idx
        if embeddings is not None:
            self.embed_tokens: nn.Embedding = embeddings.embed_tokens
            self.embed_positions: nn.Embedding = embeddings.embed_positions
            self.segment_embeddings: nn.Embedding | None = embeddings.segment_embeddings
            self.emb_layer_norm: nn.Module = embeddings.emb_layer_norm
        else:
            # Positions are numbered from padding_idx + 1: the rows up to padding are in fairseq's checkpoints, but not
            # read.
            rows = shape.max_positions + shape.padding_idx + 1
            self.embed_tokens = nn.Embedding(shape.vocabulary, shape.embed_dim, shape.padding_idx)
            self.embed_positions = nn.Embedding(rows, shape.embed_dim, shape.padding_idx)
            self.segment_embeddings = nn.Embedding(shape.token_types, shape.embed_dim) if shape.token_types else None
            self.emb_layer_norm = layer_norm(shape.embed_dim, shape.apex, shape.layer_norm_eps)
        self.project_in_dim = Linear(shape.embed_dim, shape.dim) if shape.embed_dim != shape.dim else None
        self.layers = nn.ModuleList(_layer(shape) for _ in range(shape.layers))
        initialize(self, shape.init_std)

    def embed(self, src_tokens: Tensor, token_types: Tensor | None = None) -> Tensor:
        """The summed embeddings, before their layer norm: [B, T] → [B, T, E].

        Args:
            src_tokens: int64 [B, T].
            token_types: int64 [B, T], below the shape's ``token_types``; None: all 0.

        Raises:
            ValueError: a row is longer than the position table, or there are no token types.
        """
        limit = self.shape.max_positions
        if src_tokens.size(1) > limit:
            raise ValueError(f"src_tokens {list(src_tokens.shape)}: expected at most {limit} tokens a row")
        # Only real tokens are counted, as in RoBERTa: padding before a row does not move its positions.
        real = src_tokens.ne(self.padding_idx)
        positions = real.cumsum(1) * real + self.padding_idx  # (B, T)
        x = self.embed_tokens(src_tokens) + self.embed_positions(positions)  # (B, T, E)
        if self.segment_embeddings is None:
            if token_types is not None and bool(token_types.any()):
                raise ValueError("token_types: the model has no token types; leave them out")
            return x
        if token_types is None:
            # All are of type 0: one row is broadcast, not looked up for every token.
            return x + self.segment_embeddings.weight[0]
        return x + self.segment_embeddings(token_types)

    def forward(
        self,
        src_tokens: Tensor,
        token_types: Tensor | None = None,
        infuse: Infuse | None = None,
        padded: bool | None = None,
    ) -> Tensor:
        """Hidden states of the last layer: [B, T] → [B, T, C]; see :meth:`states`."""
        # A deque of one holds one state at a time, so that a layer's input is freed when its output exists.
        return collections.deque(self.states(src_tokens, token_types, infuse, padded), maxlen=1).pop()

    def states(
        self,
        src_tokens: Tensor,
        token_types: Tensor | None = None,
        infuse: Infuse | None = None,
        padded: bool | None = None,
    ) -> Iterator[Tensor]:
        """The input of the first layer, then the output of each: [B, T, C].

        Args:
            src_tokens: int64 [B, T]; padding is not attended to.
            token_types: see :meth:`embed`.
            infuse: applied to the result of :meth:`embed`.
            padded: whether *src_tokens* have padding; None: they are looked at where that does not synchronise.
        """
        x = self.embed(src_tokens, token_types)
        if infuse is not None:
            x = infuse(x)
        padding = None if padded is False else self._padding(src_tokens)
        x = dropout(self.emb_layer_norm(x), self.shape.dropout, self.training)
        if padding is not None:
            x = x.masked_fill(padding.unsqueeze(-1), 0.0)
        if self.project_in_dim is not None:
            x = self.project_in_dim(x)  # (B, T, C)
        yield x
        visible = Bidirectional(padding)
        for layer in self.layers:
            # LayerDrop draws from the CPU's generator: reading a number that a GPU drew would synchronise.
            skip = self.training and self.shape.layerdrop > 0 and float(torch.rand(())) < self.shape.layerdrop
            x, _ = layer(x, visible=visible, skip=skip)
            yield x

    def _padding(self, src_tokens: Tensor) -> Tensor | None:
        """Padding of *src_tokens*, bool [B, T]; None where the host knows that there is none.

        Reading the result from a GPU would synchronise, so there the mask is always passed on.
        """
        padding = src_tokens.eq(self.padding_idx)
        if src_tokens.device.type == "cpu" and not torch.compiler.is_compiling() and not bool(padding.any()):
            return None
        return padding


def initialize(module: nn.Module, std: float = INIT_STD) -> None:
    """Draw all weights of *module* from N(0, std²), biases 0, rows of padding 0 (the authors of BERT)."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=std)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
        if isinstance(part, nn.Embedding) and part.padding_idx is not None:
            nn.init.zeros_(part.weight[part.padding_idx])


def _layer(shape: EncoderShape) -> TransformerLayer:
    return TransformerLayer(
        SelfAttention(shape.dim, shape.heads, shape.attention_dropout),
        shape.dim,
        shape.ffn_dim,
        dropout=shape.dropout,
        activation_dropout=shape.activation_dropout,
        activation_fn=shape.activation_fn,
        normalize_before=False,
        apex=shape.apex,
        layer_norm_eps=shape.layer_norm_eps,
    )
