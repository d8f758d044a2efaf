"""Architectures: named sets of defaults, one file a family of models."""

from fairseq.models.architectures import transformer_lm, transformer_xl

__all__ = ["transformer_lm", "transformer_xl"]
