"""Optimizers."""

from __future__ import annotations

from fairseq.optim import adafactor, adagrad, adam, lamb, nag, sgd
from fairseq.optim.fairseq_optimizer import FairseqOptimizer, build_optimizer
from fairseq.optim.groups import parameter_groups
from fairseq.registry import OPTIMIZERS, register_optimizer

__all__ = [
    "OPTIMIZERS",
    "FairseqOptimizer",
    "adafactor",
    "adagrad",
    "adam",
    "build_optimizer",
    "lamb",
    "nag",
    "parameter_groups",
    "register_optimizer",
    "sgd",
]
