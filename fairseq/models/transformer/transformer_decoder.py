"""Names that fairseq has in this module."""

from fairseq.models.transformer import Linear as Linear
from fairseq.models.transformer import TransformerDecoder as TransformerDecoder
from fairseq.models.transformer import TransformerDecoderBase as TransformerDecoderBase
