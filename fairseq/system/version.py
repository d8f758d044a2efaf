"""The version of this package."""

__version__ = "2.0.0"
