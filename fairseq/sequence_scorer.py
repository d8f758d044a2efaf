"""Names that fairseq has in this module."""

from fairseq.sequence_generator import SequenceScorer as SequenceScorer
