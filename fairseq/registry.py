"""The module's name in fairseq."""

from fairseq.config.registry import *  # noqa: F403 - another name of the module
