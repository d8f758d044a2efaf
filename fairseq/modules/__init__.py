"""Building blocks of models."""

from fairseq.former_names import names_of

__getattr__ = names_of(__name__)
