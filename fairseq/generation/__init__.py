"""Text from language models."""

from fairseq.generation.decoding import Decoding
from fairseq.generation.sampling import continuations, generator_of, sample, stream

__all__ = ["Decoding", "continuations", "generator_of", "sample", "stream"]
