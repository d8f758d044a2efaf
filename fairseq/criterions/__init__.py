"""Criterions: loss functions and their metrics."""

from fairseq.system.deferred import names_of

__getattr__, __all__ = names_of(
    __name__,
    {
        "fairseq.config.registry": "CRITERIONS register_criterion",
        "fairseq.criterions.fairseq_criterion": "FairseqCriterion build_criterion",
    },
)
