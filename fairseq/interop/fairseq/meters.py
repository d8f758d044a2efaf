"""``fairseq.meters``: running means and clocks of plug-ins."""

from __future__ import annotations

import time
from typing import Any

from fairseq.interop.fairseq.utils import item


def safe_round(number: Any, ndigits: int) -> Any:
    """*number*, or the number in a tensor, rounded; anything else unchanged."""
    number = item(number)
    return round(number, ndigits) if hasattr(number, "__round__") else number


class AverageMeter:
    """The mean of the values so far, weighted."""

    def __init__(self, round: int | None = None) -> None:
        self.round = round
        self.reset()

    def reset(self) -> None:
        self.val: Any = None
        self.sum: Any = 0
        self.count: Any = 0

    def update(self, val: Any, n: Any = 1) -> None:
        if val is not None:
            self.val = val
            self.sum, self.count = self.sum + val * n, self.count + n

    @property
    def avg(self) -> Any:
        """The mean; the last value while nothing was counted."""
        return self.sum / self.count if self.count else self.val

    @property
    def smoothed_value(self) -> Any:
        """The mean, rounded."""
        return self.avg if self.round is None or self.avg is None else safe_round(self.avg, self.round)


class TimeMeter:
    """Items a second since the start."""

    def __init__(self, init: float = 0, n: int = 0, round: int | None = None) -> None:
        self.round = round
        self.reset(init, n)

    def reset(self, init: float = 0, n: int = 0) -> None:
        self.init, self.n, self.start = init, n, time.perf_counter()

    def update(self, val: int = 1) -> None:
        self.n += val

    @property
    def elapsed_time(self) -> float:
        return self.init + time.perf_counter() - self.start

    @property
    def avg(self) -> float:
        """Items a second."""
        return self.n / self.elapsed_time


class StopwatchMeter:
    """Seconds of what is done between :meth:`start` and :meth:`stop`."""

    def __init__(self, round: int | None = None) -> None:
        self.round = round
        self.reset()

    def reset(self) -> None:
        self.sum, self.n = 0.0, 0.0
        self.start_time: float | None = None

    def start(self) -> None:
        self.start_time = time.perf_counter()

    def stop(self, n: float = 1, prehook: Any = None) -> None:
        """End the interval, in which *n* items were done."""
        if self.start_time is not None:
            # Such as a synchronisation with the GPU, without which the interval would end before the work.
            if prehook is not None:
                prehook()
            self.sum, self.n = self.sum + time.perf_counter() - self.start_time, self.n + n

    @property
    def avg(self) -> float:
        """Seconds an item."""
        return self.sum / self.n if self.n else self.sum
