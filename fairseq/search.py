"""Names that fairseq has in this module."""

from fairseq.sequence_generator import BeamSearch as BeamSearch
from fairseq.sequence_generator import DiverseBeamSearch as DiverseBeamSearch
from fairseq.sequence_generator import DiverseSiblingsSearch as DiverseSiblingsSearch
from fairseq.sequence_generator import LengthConstrainedBeamSearch as LengthConstrainedBeamSearch
from fairseq.sequence_generator import LexicallyConstrainedBeamSearch as LexicallyConstrainedBeamSearch
from fairseq.sequence_generator import PrefixConstrainedBeamSearch as PrefixConstrainedBeamSearch
from fairseq.sequence_generator import Sampling as Sampling
from fairseq.sequence_generator import Search as Search
