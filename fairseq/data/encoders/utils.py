"""Names that fairseq has in this module."""

from fairseq.data.encoders import get_whole_word_mask as get_whole_word_mask
