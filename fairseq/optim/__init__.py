"""Optimizers."""

from fairseq.system.deferred import names_of

__getattr__, __all__ = names_of(
    __name__,
    {
        "fairseq.config.registry": "OPTIMIZERS register_optimizer OPTIMIZER_REGISTRY=OPTIMIZERS",
        "fairseq.optim.fairseq_optimizer": "FairseqOptimizer LegacyFairseqOptimizer build_optimizer",
        "fairseq.optim.amp_optimizer": "AMPOptimizer",
        "fairseq.optim.groups": "hidden_matrices parameter_groups",
    },
)
