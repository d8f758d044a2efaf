"""Names that fairseq has in this module."""

from fairseq.sequence_generator import BeamSearch as BeamSearch
from fairseq.sequence_generator import Sampling as Sampling
from fairseq.sequence_generator import Search as Search
