"""Names that fairseq has in this module."""

from fairseq.data.datasets import BaseWrapperDataset as BaseWrapperDataset
