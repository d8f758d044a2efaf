"""Names that fairseq has in this module."""

from fairseq.models.inert import TransformerModelBase as TransformerModelBase
from fairseq.models.transformer import Embedding as Embedding
