"""Optimizers by name, and :func:`build_optimizer`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from torch import nn

from fairseq.optim import adam, nag, sgd
from fairseq.optim.fairseq_optimizer import OPTIMIZERS, FairseqOptimizer, register_optimizer

__all__ = ["OPTIMIZERS", "FairseqOptimizer", "adam", "build_optimizer", "nag", "register_optimizer", "sgd"]


def build_optimizer(args: argparse.Namespace, params: Iterable[nn.Parameter]) -> FairseqOptimizer:
    """The optimizer that ``args.optimizer`` names, over those of *params* that are trained.

    Raises:
        UserError: no optimizer has that name, or one of its settings is wrong.
    """
    return OPTIMIZERS[args.optimizer](args, [p for p in params if p.requires_grad])
