"""Names that fairseq has in this module."""

from fairseq.data.datasets import ConcatDataset as ConcatDataset
