"""Names that fairseq has in this module."""

from fairseq.models.transformer import TransformerEncoder as TransformerEncoder
from fairseq.models.transformer import TransformerEncoderBase as TransformerEncoderBase
