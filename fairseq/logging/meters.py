"""Small counters that can be saved; their states have fairseq's keys."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any


class AverageMeter:
    """A weighted mean. Values may be tensors: they stay on their device until :attr:`avg` is looked at."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.val: Any = None
        self.sum: Any = 0
        self.count: Any = 0

    def update(self, val: Any, n: Any = 1) -> None:
        """Add the value *val* with weight *n*."""
        self.val = val
        self.sum = self.sum + val * n
        self.count = self.count + n

    @property
    def avg(self) -> float | None:
        """The mean; the last value where all weights were 0; None before the first."""
        value = self.sum / self.count if self.count > 0 else self.val
        return None if value is None else float(value)

    def state_dict(self) -> dict[str, Any]:
        return {"val": self.val, "sum": self.sum, "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.val, self.sum, self.count = state["val"], state["sum"], state["count"]


class TimeMeter:
    """How often something happens in a second; the time before a state was saved counts too."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.n: Any = 0
        self._before = 0.0
        self._start = time.perf_counter()

    def update(self, n: Any = 1) -> None:
        """Count *n* events."""
        self.n = self.n + n

    @property
    def elapsed(self) -> float:
        """Seconds since the reset."""
        return self._before + time.perf_counter() - self._start

    @property
    def avg(self) -> float:
        """Events a second."""
        return float(self.n) / max(self.elapsed, 1e-9)

    def state_dict(self) -> dict[str, Any]:
        return {"init": self.elapsed, "n": self.n}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reset()
        self._before, self.n = state["init"], state["n"]


class StopwatchMeter:
    """Seconds between starts and stops, summed."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.sum: float = 0.0
        self.n: Any = 0
        self._start: float | None = None

    def start(self) -> None:
        self._start = time.perf_counter()

    def stop(self, n: Any = 1) -> None:
        """Add the time since :meth:`start`, spent on *n* events; without a start nothing happens."""
        if self._start is not None:
            self.sum += time.perf_counter() - self._start
            self.n = self.n + n
            self._start = None

    @property
    def avg(self) -> float:
        """Seconds an event; all of them before the first event."""
        return self.sum / float(self.n) if self.n > 0 else self.sum

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self.sum, "n": self.n}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reset()
        self.sum, self.n = state["sum"], state["n"]
