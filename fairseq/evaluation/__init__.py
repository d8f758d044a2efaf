"""Evaluation: corpora to log-probabilities, log-probabilities to figures."""

from fairseq.evaluation.scorer import Scorer, Scores, Scoring

__all__ = ["Scorer", "Scores", "Scoring"]
