"""Bidirectional transformer encoder, and its settings: embeddings and layers with full attention
over each row."""

from __future__ import annotations

import collections
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fairseq.models.encoder_settings import INIT_STD, BertConfig
from fairseq.modules.attention import Bidirectional, SelfAttention
from fairseq.modules.dropout import dropout
from fairseq.modules.linear import Linear, lowered
from fairseq.modules.norms import layer_norm
from fairseq.modules.transformer_layer import EmbeddingHook, TransformerLayer, skips_layer


class TransformerEncoder(nn.Module):
    """Token, position and token-type embeddings, a layer norm,
    and post-norm layers (Devlin et al. 2019, §3).

    Parameters are named as in fairseq's RoBERTa. Positions are learned and numbered from
    ``padding_idx + 1``, padding not counted. Embeddings and their layer norm may be shared with
    another encoder of the same embedding width.
    """

    def __init__(
        self, cfg: BertConfig, vocabulary: int, padding_idx: int, embeddings: TransformerEncoder | None = None
    ) -> None:
        super().__init__()
        self.cfg = cfg
        self.padding_idx = padding_idx
        width, apex = cfg.embedding_dim, not cfg.no_apex
        if embeddings is not None:
            self.embed_tokens: nn.Embedding = embeddings.embed_tokens
            self.embed_positions: nn.Embedding = embeddings.embed_positions
            self.segment_embeddings: nn.Embedding | None = embeddings.segment_embeddings
            self.emb_layer_norm: nn.Module = embeddings.emb_layer_norm
        else:
            # Positions are numbered from padding_idx + 1: the rows up to padding are in fairseq's
            # checkpoints, but not read.
            rows = cfg.max_positions + padding_idx + 1
            self.embed_tokens = nn.Embedding(vocabulary, width, padding_idx)
            self.embed_positions = nn.Embedding(rows, width, padding_idx)
            self.segment_embeddings = nn.Embedding(cfg.token_types, width) if cfg.token_types else None
            self.emb_layer_norm = layer_norm(width, apex, cfg.layer_norm_eps)
        dim = cfg.encoder_embed_dim
        self.project_in_dim = Linear(width, dim) if width != dim else None
        self.layers = nn.ModuleList(
            TransformerLayer(
                SelfAttention(dim, cfg.encoder_attention_heads, cfg.attention_dropout),
                dim,
                cfg.encoder_ffn_embed_dim,
                dropout=cfg.dropout,
                activation_dropout=cfg.activation_dropout,
                activation_fn=cfg.activation_fn,
                normalize_before=False,
                apex=apex,
                layer_norm_eps=cfg.layer_norm_eps,
            )
            for _ in range(cfg.encoder_layers)
        )
        initialize(self, cfg.init_std)

    def embed(self, src_tokens: Tensor, token_types: Tensor | None = None) -> Tensor:
        """The summed embeddings, before their layer norm: [B, T] → [B, T, E]; without *token_types*
        all are 0.

        Raises:
            ValueError: a row is longer than the position table, or there are no token types.
        """
        limit = self.cfg.max_positions
        if src_tokens.size(1) > limit:
            raise ValueError(f"src_tokens {list(src_tokens.shape)}: expected at most {limit} tokens a row")
        # Only real tokens are counted, as in RoBERTa:
        # padding before a row does not move its positions.
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
        infuse: EmbeddingHook | None = None,
        padded: bool | None = None,
    ) -> Tensor:
        """Hidden states of the last layer: [B, T] → [B, T, C]; see :meth:`states`."""
        # A deque of one holds one state at a time,
        # so that a layer's input is freed when its output exists.
        return collections.deque(self.states(src_tokens, token_types, infuse, padded), maxlen=1).pop()

    def states(
        self,
        src_tokens: Tensor,
        token_types: Tensor | None = None,
        infuse: EmbeddingHook | None = None,
        padded: bool | None = None,
    ) -> Iterator[Tensor]:
        """The input of the first layer, then the output of each: [B, T, C].

        Args:
            src_tokens, token_types: see :meth:`embed`; padding is not attended to.
            infuse: applied to the result of :meth:`embed`.
            padded: whether *src_tokens* have padding; None:
                they are looked at where that does not synchronise.
        """
        x = self.embed(src_tokens, token_types)
        if infuse is not None:
            x = infuse(x)
        padding = None if padded is False else self._padding(src_tokens)
        x = dropout(lowered(self.emb_layer_norm(x)), self.cfg.dropout, self.training)
        if padding is not None:
            x = x.masked_fill(padding.unsqueeze(-1), 0.0)
        if self.project_in_dim is not None:
            x = self.project_in_dim(x)  # (B, T, C)
        yield x
        tokens = src_tokens.size(1)
        visible = self.layers[0].self_attn.prepare(Bidirectional(padding), tokens, tokens, x.device)  # type: ignore
        for layer in self.layers:
            x, _ = layer(x, visible=visible, skip=skips_layer(self.cfg.encoder_layerdrop, self.training))
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
    """Draw all weights of *module* from N(0, std²),
    biases 0, rows of padding 0 (the authors of BERT)."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=std)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
        if isinstance(part, nn.Embedding) and part.padding_idx is not None:
            nn.init.zeros_(part.weight[part.padding_idx])
