"""Optimizers by name, and :func:`build_optimizer`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from fairseq.optim import adafactor, adagrad, adam, lamb, nag, sgd
from fairseq.optim.fairseq_optimizer import OPTIMIZERS, FairseqOptimizer, register_optimizer
from fairseq.optim.groups import parameter_groups
from fairseq.settings import TrainingSettings, chosen_part

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


def build_optimizer(settings: TrainingSettings | argparse.Namespace, params: Iterable[Any]) -> FairseqOptimizer:
    """Return the optimizer that *settings* choose.

    Args:
        settings: those of the run.
        params: parameters, of which those that require a gradient are trained, or groups of them as dicts.

    Raises:
        UserError: no optimizer has that name, or one of its settings is invalid.
    """
    cls, given = chosen_part(OPTIMIZERS, "optimizer", settings)
    return cls(given, [p for p in params if isinstance(p, dict) or p.requires_grad])
