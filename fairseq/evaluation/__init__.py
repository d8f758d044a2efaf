"""Evaluation: log-probabilities of corpora, and metrics computed from them."""

from fairseq.evaluation.scorer import Scorer, Scores, Scoring

__all__ = ["Scorer", "Scores", "Scoring"]
