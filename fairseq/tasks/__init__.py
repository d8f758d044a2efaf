"""Tasks: data, batches, model and criterion of a training objective."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, TypeVar

from fairseq.registry import Registry
from fairseq.settings import Settings, chosen_part
from fairseq.tasks.fairseq_task import FairseqTask

T = TypeVar("T", bound=type)

TASKS: Registry[Any] = Registry("task", "--task")


def register_task(name: str, dataclass: type | None = None) -> Callable[[T], T]:
    """Class decorator that registers a task as *name*, with the dataclass of its settings if it has one."""
    return TASKS.register(name, dataclass)


def setup_task(settings: Settings | argparse.Namespace) -> FairseqTask:
    """Return the task that *settings* select, with its dictionary loaded."""
    cls, _ = chosen_part(TASKS, "task", settings)
    return cls.setup_task(settings.given_to(cls, settings) if isinstance(settings, Settings) else settings)


from fairseq.tasks import (  # noqa: E402  (for their registration)
    language_modeling,
    masked_lm,
    sentence_prediction,
    tnf_masked_lm,
    truncated_bptt_lm,
)

__all__ = [
    "TASKS",
    "FairseqTask",
    "language_modeling",
    "masked_lm",
    "register_task",
    "sentence_prediction",
    "setup_task",
    "tnf_masked_lm",
    "truncated_bptt_lm",
]
