"""Figures that a plug-in computes in fairseq's ``reduce_metrics``, which logs them by side effect."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from fairseq.logging.figures import UPDATES, Figure, Values

logger = logging.getLogger(__name__)

Reduce = Callable[[list[Mapping[str, Any]]], Any]


@dataclass(frozen=True)
class Average:
    """A figure that was logged: its value, the sum whose mean it is, and whether values of updates add up."""

    avg: float
    sum: float
    adds_up: bool = False

    @property
    def val(self) -> float:
        """The value, under another of fairseq's names."""
        return self.avg


Derived = Callable[[Mapping[str, Average]], float]
_COLLECTED: ContextVar[dict[str, Average | Derived] | None] = ContextVar("collected figures", default=None)


def collect(name: str, value: Average | Derived) -> None:
    """Log the figure *name*: a value, or a function of all values; ignored outside of ``reduce_metrics``."""
    collected = _COLLECTED.get()
    if collected is not None:
        collected[name] = value


def log_figures(figures: Mapping[str, Figure], sums: Values) -> None:
    """Log the *figures* that *sums* are there for."""
    for name, figure in figures.items():
        if figure.is_known(sums):
            value = figure.compute(sums)
            collect(name, Average(value, value))


@contextmanager
def collecting() -> Iterator[dict[str, Average | Derived]]:
    """The dict that figures are collected in, inside a ``with`` statement."""
    collected: dict[str, Average | Derived] = {}
    token = _COLLECTED.set(collected)
    try:
        yield collected
    finally:
        _COLLECTED.reset(token)


def reduced_figures(reduce: Reduce) -> dict[str, Figure]:
    """The figures that *reduce* logs, found by a trial in which every sum is 1.

    fairseq calls ``reduce_metrics`` for every update and averages what it logs. Here it is called with sums over
    updates, which gives the same for ratios of sums; a figure that doubles with the sums is divided by the updates,
    unless it was logged as one that adds up. *reduce* gets a list of one dict: the sums by name.
    """
    with collecting() as logged:
        reduce([_Equal(1.0)])
    ones, twos = _values(logged), _reduced(reduce, _Equal(2.0))
    means = set()
    for name, value in ones.items():
        figure, of_twos = logged[name], twos.get(name, math.nan)
        if (isinstance(figure, Average) and figure.adds_up) or math.isclose(of_twos, value):
            continue
        if math.isclose(of_twos, 2 * value):
            means.add(name)
        else:
            logger.warning("figure %s: neither a ratio of sums nor a sum, so that it depends on `log_interval`", name)
    return {name: _ReducedFigure.of(reduce, name, name in means) for name in ones}


@dataclass(frozen=True)
class _ReducedFigure(Figure):
    """A figure that ``reduce_metrics`` logs, or with some sums does not."""

    logs: Callable[[Values], bool] = lambda totals: True

    @classmethod
    def of(cls, reduce: Reduce, name: str, is_mean: bool) -> _ReducedFigure:
        """The figure that *reduce* logs as *name*; with *is_mean* its mean over updates."""

        def compute(sums: Values) -> float:
            return _reduced(reduce, sums)[name] / (sums.get(UPDATES, 1) if is_mean else 1)

        return cls(compute, logs=lambda sums: name in _reduced(reduce, sums))

    def is_known(self, totals: Values) -> bool:
        return self.logs(totals)


def _reduced(reduce: Reduce, sums: Values) -> dict[str, float]:
    """The figures by name, in the order in which they were logged."""
    with collecting() as logged:
        reduce([sums])
    return _values(logged)


def _values(logged: Mapping[str, Average | Derived]) -> dict[str, float]:
    averages = {name: value for name, value in logged.items() if isinstance(value, Average)}
    return {name: value.avg if isinstance(value, Average) else float(value(averages)) for name, value in logged.items()}


class _Equal(dict[str, Any]):
    """Sums by name, all of them present and equal to *value*."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> float:
        return self.value

    # `dict.get` does not ask `__missing__`.
    def get(self, name: str, default: Any = None) -> float:
        return self.value
