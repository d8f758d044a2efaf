"""Evaluation: checkpoints to models, corpora to log-probabilities, log-probabilities to figures."""

from fairseq.evaluation.ensemble import load_models
from fairseq.evaluation.scorer import Scorer, Scores, Scoring

__all__ = ["Scorer", "Scores", "Scoring", "load_models"]
