"""``fairseq.models.lstm``: the decoder that plug-ins build language models of."""

from __future__ import annotations

from typing import Any

from torch import nn

from fairseq.models import lstm_lm
from fairseq.models.lstm_lm import INIT
from fairseq.models.lstm_lm_settings import LSTMLMConfig
from fairseq.text.dictionary import Dictionary

DEFAULT_MAX_SOURCE_POSITIONS = DEFAULT_MAX_TARGET_POSITIONS = int(1e5)


class LSTMDecoder(lstm_lm.LSTMDecoder):
    """This package's decoder with fairseq's constructor; it returns hidden states, not logits.

    Raises:
        NotImplementedError: attention to an encoder, which does not exist here.
    """

    def __init__(
        self,
        dictionary: Dictionary,
        embed_dim: int = 512,
        hidden_size: int = 512,
        out_embed_dim: int = 512,
        num_layers: int = 1,
        dropout_in: float = 0.1,
        dropout_out: float = 0.1,
        attention: bool = True,
        encoder_output_units: int = 512,
        pretrained_embed: nn.Embedding | None = None,
        share_input_output_embed: bool = False,
        adaptive_softmax_cutoff: list[int] | None = None,
        max_target_positions: float = DEFAULT_MAX_TARGET_POSITIONS,
        residuals: bool = False,
    ) -> None:
        # fairseq's defaults ask for attention to an encoder; a plug-in's language model turns both
        # off.
        if attention or encoder_output_units:
            raise NotImplementedError("LSTMDecoder: there are no encoders; attention=False, encoder_output_units=0")
        cfg = LSTMLMConfig(
            decoder_embed_dim=embed_dim,
            decoder_hidden_size=hidden_size,
            decoder_out_embed_dim=out_embed_dim,
            decoder_layers=num_layers,
            decoder_dropout_in=dropout_in,
            decoder_dropout_out=dropout_out,
            share_decoder_input_output_embed=share_input_output_embed,
            adaptive_softmax_cutoff=adaptive_softmax_cutoff,
            max_target_positions=int(max_target_positions),
            residuals=residuals,
        )
        super().__init__(cfg, len(dictionary), dictionary.pad())
        self.dictionary = dictionary
        if pretrained_embed is not None:
            self.embed_tokens = pretrained_embed


def Embedding(num_embeddings: int, embedding_dim: int, padding_idx: int) -> nn.Embedding:
    """Embeddings with fairseq's initial values; padding's row is zero."""
    module = nn.Embedding(num_embeddings, embedding_dim, padding_idx)
    nn.init.uniform_(module.weight, -INIT, INIT)
    nn.init.zeros_(module.weight[padding_idx])
    return module


def Linear(in_features: int, out_features: int, bias: bool = True, dropout: float = 0.0) -> nn.Linear:
    """A linear layer with fairseq's initial values."""
    module: Any = nn.Linear(in_features, out_features, bias)
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -INIT, INIT)
    return module
