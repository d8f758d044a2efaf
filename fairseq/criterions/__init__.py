"""Criterions: loss functions and their figures."""

from fairseq.config.registry import CRITERIONS, register_criterion
from fairseq.criterions import (
    cross_entropy,
    electra,
    masked_lm,
    sentence_prediction,
)
from fairseq.criterions.fairseq_criterion import FairseqCriterion, build_criterion

__all__ = [
    "CRITERIONS",
    "FairseqCriterion",
    "build_criterion",
    "cross_entropy",
    "electra",
    "masked_lm",
    "register_criterion",
    "sentence_prediction",
]
