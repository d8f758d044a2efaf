"""Efficient transformer language models, with fairseq's command lines, formats and plug-in points."""

from fairseq.interop.fairseq import names

__version__ = "0.3.0"

names.install()
