"""Text from language models."""

from fairseq.inference.decoding import Decoding
from fairseq.inference.sampling import continuations, generator_of, sample, stream

__all__ = ["Decoding", "continuations", "generator_of", "sample", "stream"]
