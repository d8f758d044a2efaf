"""Efficient transformer language models, with fairseq's command lines, formats and plug-in points."""

from fairseq import former_names

__version__ = "0.3.0"

former_names.install()
