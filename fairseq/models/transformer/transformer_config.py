"""Names that fairseq has in this module."""

from fairseq.modules.transformer_config import TransformerConfig as TransformerConfig
