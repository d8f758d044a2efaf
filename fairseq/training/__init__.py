"""Training: the state of a run, one update, the loop and its callbacks."""

from fairseq.training.callbacks import Callback, register_callback
from fairseq.training.limit import Limit
from fairseq.training.loop import train, training_job
from fairseq.training.state import TrainingState

__all__ = ["Callback", "Limit", "TrainingState", "register_callback", "train", "training_job"]
