"""Names that fairseq has in this module."""

from fairseq.data.datasets import RandomCropDataset as RandomCropDataset
from fairseq.data.datasets import TruncateDataset as TruncateDataset
from fairseq.data.datasets import maybe_shorten_dataset as maybe_shorten_dataset
