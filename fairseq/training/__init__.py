"""Training: the state of a run, one update, the loop and its hooks."""

from fairseq.training.hooks import Hook, register_hook
from fairseq.training.loop import train, training_job
from fairseq.training.state import TrainingState

__all__ = ["Hook", "TrainingState", "register_hook", "train", "training_job"]
