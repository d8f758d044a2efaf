"""Efficient transformer language models, with fairseq's command lines, formats and plug-in points."""

__version__ = "0.1.0"
