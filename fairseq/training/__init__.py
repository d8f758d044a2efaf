"""Training: runs, stages, updates, weight averaging and loss scaling."""

from fairseq.training.loop import train, training_job
from fairseq.training.trainer import Trainer

__all__ = ["Trainer", "train", "training_job"]
