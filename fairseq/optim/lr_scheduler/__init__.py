"""Learning-rate schedules."""

from fairseq.system.deferred import names_of

__getattr__, __all__ = names_of(
    __name__,
    {
        "fairseq.config.registry": "LR_SCHEDULERS register_lr_scheduler",
        "fairseq.optim.lr_scheduler.fairseq_lr_scheduler": "FairseqLRScheduler build_lr_scheduler",
    },
)
