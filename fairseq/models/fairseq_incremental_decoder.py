"""Names that fairseq has in this module."""

from fairseq.models.fairseq_decoder import FairseqIncrementalDecoder as FairseqIncrementalDecoder
