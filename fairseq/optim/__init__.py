"""Optimizers."""

from __future__ import annotations

from fairseq.config.registry import OPTIMIZERS, register_optimizer
from fairseq.optim import adafactor, adagrad, adam, lamb, muon, nag, sgd
from fairseq.optim.fairseq_optimizer import FairseqOptimizer, build_optimizer
from fairseq.optim.groups import hidden_matrices, parameter_groups

__all__ = [
    "OPTIMIZERS",
    "FairseqOptimizer",
    "adafactor",
    "adagrad",
    "adam",
    "build_optimizer",
    "hidden_matrices",
    "lamb",
    "muon",
    "nag",
    "parameter_groups",
    "register_optimizer",
    "sgd",
]
