"""``fairseq.meters``: running means and clocks of plug-ins."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def item(tensor: object) -> Any:
    """The number in a tensor of one element; anything else unchanged."""
    return tensor.item() if hasattr(tensor, "item") else tensor


def safe_round(number: object, ndigits: int) -> Any:
    """*number*, or the number in a tensor, rounded; anything else unchanged."""
    number = item(number)
    return round(number, ndigits) if hasattr(number, "__round__") else number


class Meter:
    """Base of meters, whose attributes are their state."""

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update(state_dict)


class AverageMeter(Meter):
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


class SumMeter(AverageMeter):
    """The sum of the values so far."""

    def update(self, val: object, n: object = 1) -> None:
        if val is not None:
            self.sum = self.sum + val

    @property
    def smoothed_value(self) -> Any:
        """The sum, rounded."""
        return self.sum if self.round is None else safe_round(self.sum, self.round)


class TimeMeter(Meter):
    """Items a second since the start."""

    started = False

    def __init__(self, init: float = 0, n: int = 0, round: int | None = None) -> None:
        self.round = round
        self.reset(init, n)

    def reset(self, init: float = 0, n: int = 0) -> None:
        self.init, self.n, self.start = init, n, time.perf_counter()
        self.started = False

    def start_clock(self) -> None:
        """Begin to count."""
        self.reset()
        self.started = True

    def update(self, val: int = 1) -> None:
        self.n += val

    @property
    def elapsed_time(self) -> float:
        return self.init + time.perf_counter() - self.start

    @property
    def avg(self) -> float:
        """Items a second."""
        return self.n / self.elapsed_time

    @property
    def smoothed_value(self) -> float:
        """The speed, rounded."""
        return self.avg if self.round is None else safe_round(self.avg, self.round)


class StopwatchMeter(Meter):
    """Seconds of what is done between :meth:`start` and :meth:`stop`."""

    def __init__(self, round: int | None = None) -> None:
        self.round = round
        self.reset()

    def reset(self) -> None:
        self.sum, self.n = 0.0, 0.0
        self.start_time: float | None = None

    def start(self) -> None:
        self.start_time = time.perf_counter()

    def stop(self, n: float = 1, prehook: Callable[[], object] | None = None) -> None:
        """End the interval, in which *n* items were done."""
        if self.start_time is not None:
            # Such as a synchronisation with the GPU, without which the interval would end before
            # the work.
            if prehook is not None:
                prehook()
            self.sum, self.n = self.sum + time.perf_counter() - self.start_time, self.n + n

    @property
    def avg(self) -> float:
        """Seconds an item."""
        return self.sum / self.n if self.n else self.sum

    @property
    def smoothed_value(self) -> float:
        """The seconds so far, rounded."""
        return self.sum if self.round is None else safe_round(self.sum, self.round)


class MetersDict(dict[str, Any]):
    """Meters by name, in the order of their priorities."""

    class Derived:
        """A figure that is computed from the meters."""

        def __init__(self, fn: Callable[[Any], object]) -> None:
            self.fn = fn

        def reset(self) -> None:
            """Do nothing: there is no value of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.priorities: dict[str, tuple[int, int]] = {}

    def add_meter(self, key: str, meter: object, priority: int) -> None:
        """Add *meter* behind the ones of a lower or the same *priority*."""
        self.priorities[key] = (priority, len(self))
        self[key] = meter
        for name in sorted(self, key=self.priorities.__getitem__):
            self[name] = self.pop(name)

    def get_smoothed_value(self, key: str) -> Any:
        """The value of the meter *key*, or of its function."""
        meter = self[key]
        return meter.fn(self) if isinstance(meter, MetersDict.Derived) else meter.smoothed_value

    def get_smoothed_values(self) -> dict[str, object]:
        """The values of all meters whose names do not begin with ``_``."""
        return {key: self.get_smoothed_value(key) for key in self if not key.startswith("_")}

    def reset(self) -> None:
        for meter in self.values():
            meter.reset()

    def state_dict(self) -> list[tuple[int, str, str, dict[str, object]]]:
        """Priority, name, class and values of each meter; derived ones are left out."""
        return [
            (self.priorities[key][0], key, type(meter).__name__, meter.state_dict())
            for key, meter in self.items()
            if type(meter) in (AverageMeter, SumMeter, TimeMeter, StopwatchMeter)
        ]

    def load_state_dict(self, state_dict: list[tuple[int, str, str, dict[str, object]]]) -> None:
        kinds = {kind.__name__: kind for kind in (AverageMeter, SumMeter, TimeMeter, StopwatchMeter)}
        for priority, key, kind, values in state_dict:
            meter = kinds[kind]()
            meter.load_state_dict(values)
            self.add_meter(key, meter, priority)
