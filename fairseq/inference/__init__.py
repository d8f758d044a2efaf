"""Text from language models."""

from fairseq.inference.search import Hypothesis, Search, generate, generator_of, stream

__all__ = ["Hypothesis", "Search", "generate", "generator_of", "stream"]
