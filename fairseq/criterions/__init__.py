"""Criterions: loss functions and their metrics."""

from fairseq.system.deferred import names_of

__getattr__, __all__ = names_of(
    __name__,
    {
        "fairseq.config.registry": "CRITERIONS register_criterion CRITERION_REGISTRY=CRITERIONS",
        # MoECriterion is of a fork for mixtures of experts, which packages beside it import.
        "fairseq.criterions.fairseq_criterion": """
            FairseqCriterion LegacyFairseqCriterion build_criterion MoECriterion
        """,
        "fairseq.dataclass": "MoECriterionConfig=FairseqDataclass",
    },
)
