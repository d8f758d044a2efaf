"""Names that fairseq has in this module."""

from fairseq.data.encoders import SentencepieceBPE as SentencepieceBPE
