"""``fairseq.metrics``: figures logged from a plug-in's ``reduce_metrics``; they reach the log and the recorders."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from fairseq.logging.reduced import Average, Derived, collect, collecting


def log_scalar(key: str, value: Any, weight: Any = 1, priority: int = 10, round: int | None = None) -> None:
    """Log *value*, the mean of *weight* items, as the figure *key*; order and rounding are the log's own."""
    collect(key, Average(float(value), float(value) * float(weight)))


def log_scalar_sum(key: str, value: Any, priority: int = 10, round: int | None = None) -> None:
    """Log the sum *value*, which adds up over updates, as the figure *key*."""
    collect(key, Average(float(value), float(value), adds_up=True))


def log_derived(key: str, fn: Derived, priority: int = 20) -> None:
    """Log a figure computed from the others: ``fn({name: Average})``."""
    collect(key, fn)


def log_speed(*values: Any, **options: Any) -> None:
    """Ignore speeds and clocks: the log has the run's own."""


log_start_time = log_stop_time = log_speed


def get_smoothed_values(name: str) -> dict[str, float]:
    """Return no metrics: a run's are in its log and its ``--metrics-file``."""
    return {}


def get_smoothed_value(name: str, key: str) -> float:
    """Return 0, as of a figure without values; see :func:`get_smoothed_values`."""
    return 0.0


def reset_meters(name: str = "") -> None:
    """Do nothing: the log begins its own intervals."""


reset = reset_meters


@contextlib.contextmanager
def aggregate(name: str | None = None, new_root: bool = False) -> Iterator[Any]:
    """Collect metrics for a while: metrics of *name* still reach the log, unless *new_root*."""
    if not new_root:
        yield None
        return
    with collecting() as collected:
        yield collected
