"""Names that fairseq has in this module."""

from fairseq.data.encoders import GPT2BPE as GPT2BPE
