"""Tasks: data, batches, model and criterion of a training objective."""

from fairseq.system.deferred import names_of

__getattr__, __all__ = names_of(
    __name__,
    {
        "fairseq.config.registry": "TASKS register_task TASK_REGISTRY=TASKS",
        "fairseq.tasks.fairseq_task": "FairseqTask LegacyFairseqTask=FairseqTask setup_task get_task",
        "fairseq.dataclass": "FairseqDataclass",
        "fairseq.utils": "import_tasks",
    },
)
