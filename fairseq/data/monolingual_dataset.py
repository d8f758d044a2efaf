"""Names that fairseq has in this module."""

from fairseq.data.block_datasets import MonolingualDataset as MonolingualDataset
from fairseq.data.block_datasets import collate as collate
