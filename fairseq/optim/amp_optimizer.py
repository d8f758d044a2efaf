"""The name that copied training steps compare an optimizer with."""

from fairseq.optim.fairseq_optimizer import FairseqOptimizer


class AMPOptimizer(FairseqOptimizer):
    """No optimizer is one: autocast needs none here."""
