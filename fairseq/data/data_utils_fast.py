"""Names that fairseq has in this module."""

from fairseq.data.data_utils import batch_by_size_fn as batch_by_size_fn
from fairseq.data.data_utils import batch_by_size_vec as batch_by_size_vec
