"""Names that fairseq has in this module."""

from fairseq.data.block_datasets import TruncatedDictionary as TruncatedDictionary
from fairseq.text.dictionary import Dictionary as Dictionary
