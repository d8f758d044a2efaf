"""Names that fairseq has in this module."""

from fairseq.data.datasets import FairseqDataset as FairseqDataset
