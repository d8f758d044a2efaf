"""Names that fairseq has in this module."""

from fairseq.data.block_datasets import MaskTokensDataset as MaskTokensDataset
