"""Architectures: named sets of defaults, one file a family of models."""

from fairseq.models.architectures import bert, electra, lstm_lm, transformer_lm, transformer_xl

__all__ = ["bert", "electra", "lstm_lm", "transformer_lm", "transformer_xl"]
