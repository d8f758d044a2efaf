"""``fairseq.models.transformer``: the decoder that plug-ins build language models of."""

from __future__ import annotations

import argparse
from typing import Any

from torch import Tensor, nn

from fairseq.config.fields import typed
from fairseq.models import transformer_lm
from fairseq.text.dictionary import Dictionary

DEFAULT_MAX_SOURCE_POSITIONS = DEFAULT_MAX_TARGET_POSITIONS = 1024
DEFAULT_MIN_PARAMS_TO_WRAP = int(1e8)


class TransformerDecoder(transformer_lm.TransformerDecoder):
    """This package's decoder with fairseq's constructor; it returns hidden states, not logits.

    Args:
        args: the flat namespace.
        dictionary: the words of the output.
        embed_tokens: the input embeddings.
        no_encoder_attn: ignored: there is no encoder.
    """

    def __init__(
        self, args: argparse.Namespace, dictionary: Dictionary, embed_tokens: nn.Module, no_encoder_attn: bool = True
    ) -> None:
        cfg = typed(transformer_lm.TransformerLMConfig, args)
        cfg.check_vocabulary(len(dictionary))
        super().__init__(cfg, len(dictionary), dictionary.pad(), not cfg.no_apex, embed_tokens)
        self.dictionary = dictionary


def Embedding(num_embeddings: int, embedding_dim: int, padding_idx: int) -> nn.Embedding:
    """Embeddings with fairseq's initial values; that of padding is zero."""
    module = nn.Embedding(num_embeddings, embedding_dim, padding_idx)
    nn.init.normal_(module.weight, std=embedding_dim**-0.5)
    nn.init.zeros_(module.weight[padding_idx])
    return module


def Linear(in_features: int, out_features: int, bias: bool = True) -> nn.Linear:
    """A linear layer with fairseq's initial values."""
    module = nn.Linear(in_features, out_features, bias)
    nn.init.xavier_uniform_(module.weight)
    if bias:
        nn.init.zeros_(module.bias)
    return module


class CharacterTokenEmbedder(nn.Module):
    """The name of fairseq's embeddings of characters, which are not implemented."""

    def __init__(self, *args: Any) -> None:
        raise NotImplementedError("--character-embeddings: not implemented; leave it out")

    def forward(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError
