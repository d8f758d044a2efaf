"""Names that fairseq has in this module."""

from fairseq.modules.fairseq_modules import SinusoidalPositionalEmbedding as SinusoidalPositionalEmbedding
