"""Models with an encoder and a decoder, and the names of other bases of models."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fairseq.models.base import BaseFairseqModel as BaseFairseqModel
from fairseq.models.base import BaseFairseqModel as FairseqModel  # noqa: F401 - its name before fairseq 0.9
from fairseq.models.base import FairseqLanguageModel as FairseqLanguageModel
from fairseq.models.fairseq_decoder import FairseqEncoderModel as FairseqEncoderModel


class FairseqEncoderDecoderModel(BaseFairseqModel):
    """An encoder, whose output the decoder reads; its parts are the plug-in's own."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(self, src_tokens: Tensor, src_lengths: Any, prev_output_tokens: Tensor, **kwargs: Any) -> Any:
        """The decoder's output and extra."""
        encoder_out = self.encoder(src_tokens, src_lengths=src_lengths, **kwargs)
        return self.decoder(prev_output_tokens, encoder_out=encoder_out, **kwargs)
