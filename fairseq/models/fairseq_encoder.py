"""Bases of encoders."""

from __future__ import annotations

from typing import Any, NamedTuple

from fairseq.models.fairseq_decoder import FairseqEncoder as FairseqEncoder
from fairseq.models.fairseq_decoder import FairseqEncoderModel as FairseqEncoderModel


class EncoderOut(NamedTuple):
    """An encoder's output in fairseq up to 0.10."""

    encoder_out: Any
    encoder_padding_mask: Any
    encoder_embedding: Any
    encoder_states: Any
    src_tokens: Any
    src_lengths: Any
