"""Text from a language model."""

from fairseq.generation.sampling import sample

__all__ = ["sample"]
