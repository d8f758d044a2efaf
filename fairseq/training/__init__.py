"""Training: runs, stages, updates, weight averaging and loss scaling."""

from fairseq.training.job import launch, train
from fairseq.training.trainer import Trainer

__all__ = ["Trainer", "launch", "train"]
