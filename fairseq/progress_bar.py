"""The module's name before fairseq 0.12."""

from fairseq.logging.progress_bar import *  # noqa: F403 - another name of the module
