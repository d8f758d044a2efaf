"""Optimizers."""

from fairseq.system.deferred import names_of

__getattr__, __all__ = names_of(
    __name__,
    {
        "fairseq.config.registry": "OPTIMIZERS register_optimizer",
        "fairseq.optim.fairseq_optimizer": "FairseqOptimizer build_optimizer",
        "fairseq.optim.groups": "hidden_matrices parameter_groups",
    },
)
