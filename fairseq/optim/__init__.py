"""Optimizers."""

from __future__ import annotations

from fairseq.config.registry import OPTIMIZERS, register_optimizer
from fairseq.optim import adafactor, adam, muon, sgd
from fairseq.optim.fairseq_optimizer import FairseqOptimizer, build_optimizer
from fairseq.optim.groups import hidden_matrices, parameter_groups

__all__ = [
    "OPTIMIZERS",
    "FairseqOptimizer",
    "adafactor",
    "adam",
    "build_optimizer",
    "hidden_matrices",
    "muon",
    "parameter_groups",
    "register_optimizer",
    "sgd",
]
