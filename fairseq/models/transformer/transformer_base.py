"""Names that fairseq has in this module."""

from fairseq.models.transformer import Embedding as Embedding
