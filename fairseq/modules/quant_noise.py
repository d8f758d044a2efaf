"""Names that fairseq has in this module."""

from fairseq.modules.fairseq_modules import quant_noise as quant_noise
