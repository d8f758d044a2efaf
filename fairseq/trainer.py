"""Names that fairseq has in this module."""

from fairseq.training.state import TrainingState

Trainer = TrainingState
