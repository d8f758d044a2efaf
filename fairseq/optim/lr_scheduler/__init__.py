"""Learning-rate schedules."""

from fairseq.system.deferred import names_of

__getattr__, __all__ = names_of(
    __name__,
    {
        "fairseq.config.registry": "LR_SCHEDULERS register_lr_scheduler LR_SCHEDULER_REGISTRY=LR_SCHEDULERS",
        "fairseq.optim.lr_scheduler.fairseq_lr_scheduler": """
            FairseqLRScheduler LegacyFairseqLRScheduler build_lr_scheduler
        """,
    },
)
