"""Efficient transformer language models, with fairseq's command lines, formats and plug-in points."""

from fairseq.interop.fairseq import names
from fairseq.system.version import __version__, warn_of_neighbour

__all__ = ["__version__"]

names.install()
warn_of_neighbour()
