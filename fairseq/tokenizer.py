"""Names that fairseq has in this module."""

from fairseq.utils import tokenize_line as tokenize_line
