"""Training: runs, stages, updates, weight averaging and loss scaling."""

from fairseq.training.job import train
from fairseq.training.trainer import Trainer

__all__ = ["Trainer", "train"]
