"""Tasks: data, batches, model and criterion of a training objective."""

from fairseq.config.registry import TASKS, register_task
from fairseq.tasks import language_modeling, masked_lm, sentence_prediction
from fairseq.tasks.fairseq_task import FairseqTask, setup_task

__all__ = [
    "TASKS",
    "FairseqTask",
    "language_modeling",
    "masked_lm",
    "register_task",
    "sentence_prediction",
    "setup_task",
]
