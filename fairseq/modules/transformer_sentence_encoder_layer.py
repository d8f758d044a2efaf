"""Names that fairseq has in this module."""

from fairseq.modules.fairseq_layers import TransformerSentenceEncoderLayer as TransformerSentenceEncoderLayer
