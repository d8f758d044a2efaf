"""Names that fairseq has in this module."""

from fairseq.modules.fairseq_modules import checkpoint_wrapper as checkpoint_wrapper
