"""Criterions: loss functions and their figures."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, TypeVar

from fairseq.criterions.fairseq_criterion import FairseqCriterion
from fairseq.registry import Registry
from fairseq.settings import Settings, chosen_part

T = TypeVar("T", bound=type)

CRITERIONS: Registry[Any] = Registry("criterion", "--criterion")


def register_criterion(name: str, dataclass: type | None = None) -> Callable[[T], T]:
    """Class decorator that registers a criterion as *name*, with the dataclass of its settings if it has one."""
    return CRITERIONS.register(name, dataclass)


def build_criterion(settings: Settings | argparse.Namespace, task: Any) -> FairseqCriterion:
    """Return the criterion that *settings* select."""
    cls, given = chosen_part(CRITERIONS, "criterion", settings)
    return cls.build_criterion(given, task)


from fairseq.criterions import (  # noqa: E402  (for their registration)
    adaptive_loss,
    cross_entropy,
    electra,
    label_smoothed_cross_entropy,
    masked_lm,
    sentence_prediction,
)

__all__ = [
    "CRITERIONS",
    "FairseqCriterion",
    "adaptive_loss",
    "build_criterion",
    "cross_entropy",
    "electra",
    "label_smoothed_cross_entropy",
    "masked_lm",
    "register_criterion",
    "sentence_prediction",
]
