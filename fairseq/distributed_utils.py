"""The module's name before fairseq 0.12."""

from fairseq.distributed.utils import *  # noqa: F403 - another name of the module
