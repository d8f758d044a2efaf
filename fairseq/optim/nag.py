"""Names that fairseq has in this module."""

from fairseq.dataclass import extendable
from fairseq.optim.settings import NAGConfig
from fairseq.optim.sgd import NAG as NAG
from fairseq.optim.sgd import FairseqNAG as FairseqNAG

FairseqNAGConfig = extendable("FairseqNAGConfig", NAGConfig)
