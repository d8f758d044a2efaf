"""Names that fairseq has in this module."""

from fairseq.modules.fairseq_layers import TransformerSentenceEncoder as TransformerSentenceEncoder
from fairseq.modules.fairseq_layers import init_bert_params as init_bert_params
