"""Architectures: named sets of defaults, one file a family of models."""

from fairseq.models.architectures import bert, lstm_lm, transformer_lm, transformer_xl

__all__ = ["bert", "lstm_lm", "transformer_lm", "transformer_xl"]
