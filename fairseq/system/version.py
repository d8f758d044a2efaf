"""The version of this package."""

NAME = "fairseq-short"  # of this package on an index
__version__ = "2.0.0"
