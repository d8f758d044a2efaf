"""``fairseq.metrics``: figures logged by name, in the aggregators that are active."""

from __future__ import annotations

import contextlib
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from fairseq.logging.meters import AverageMeter, MetersDict, StopwatchMeter, SumMeter, TimeMeter

_aggregators: dict[str, MetersDict] = {}
_active: dict[str, MetersDict] = {}
_counts: Counter[str] = Counter()


def reset() -> None:
    """Forget all aggregators but a new one called *default*."""
    _aggregators.clear()
    _active.clear()
    _counts.clear()
    _aggregators["default"] = _active["default"] = MetersDict()
    _counts["default"] = 1


reset()


@contextlib.contextmanager
def aggregate(name: str | None = None, new_root: bool = False) -> Iterator[MetersDict]:
    """Collect what is logged meanwhile, under *name* if given; with *new_root* nothing outside
    collects it."""
    if name is None:  # which nobody can ask for later
        name, aggregator = str(uuid.uuid4()), MetersDict()
    else:
        aggregator = _aggregators.setdefault(name, MetersDict())
    former = (dict(_active), Counter(_counts))
    if new_root:
        _active.clear()
        _counts.clear()
    _active[name] = aggregator
    _counts[name] += 1
    try:
        yield aggregator
    finally:
        _counts[name] -= 1
        if not _counts[name]:
            _active.pop(name, None)
        if new_root:
            _active.clear()
            _active.update(former[0])
            _counts.clear()
            _counts.update(former[1])


def get_active_aggregators() -> list[MetersDict]:
    return list(_active.values())


def _log(key: str, make: Callable[[], object], priority: int, update: Callable[[Any], object]) -> None:
    for aggregator in get_active_aggregators():
        if key not in aggregator:
            aggregator.add_meter(key, make(), priority)
        update(aggregator[key])


def log_scalar(key: str, value: object, weight: object = 1, priority: int = 10, round: int | None = None) -> None:
    """Log *value*, the mean of *weight* items, as the figure *key*."""
    _log(key, lambda: AverageMeter(round=round), priority, lambda meter: meter.update(value, weight))


def log_scalar_sum(key: str, value: object, priority: int = 10, round: int | None = None) -> None:
    """Log *value*, of which the figure *key* is the sum."""
    _log(key, lambda: SumMeter(round=round), priority, lambda meter: meter.update(value))


def log_derived(key: str, fn: Callable[[MetersDict], object], priority: int = 20) -> None:
    """Log a figure computed from the others: ``fn(meters)``."""
    for aggregator in get_active_aggregators():
        if key not in aggregator:
            aggregator.add_meter(key, MetersDict.Derived(fn), priority)


def log_speed(key: str, value: Any, priority: int = 30, round: int | None = None) -> None:
    """Log a number of items, of which the figure *key* is the number a second."""

    def update(meter: TimeMeter) -> None:
        # The first call starts the clock.
        meter.update(value) if meter.started else meter.start_clock()

    _log(key, lambda: TimeMeter(round=round), priority, update)


def log_start_time(key: str, priority: int = 40, round: int | None = None) -> None:
    _log(key, lambda: StopwatchMeter(round=round), priority, lambda meter: meter.start())


def log_custom(
    new_meter_fn: Callable[[], object], key: str, *args: object, priority: int = 50, **kwargs: object
) -> None:
    """Log into a meter of an own class, which *new_meter_fn* makes."""
    _log(key, new_meter_fn, priority, lambda meter: meter.update(*args, **kwargs))


def reset_meters(name: str) -> None:
    if (meters := get_meters(name)) is not None:
        meters.reset()


def get_meter(name: str, key: str) -> Any:
    """The meter *key* of the aggregator *name*; None without one."""
    meters = get_meters(name)
    return None if meters is None else meters.get(key)


def get_meters(name: str) -> MetersDict | None:
    return _aggregators.get(name)


def get_smoothed_value(name: str, key: str) -> Any:
    """The figure *key* of the aggregator *name*."""
    return _aggregators[name].get_smoothed_value(key)


def get_smoothed_values(name: str) -> dict[str, object]:
    """The figures of the aggregator *name*, in the order of their priorities."""
    return _aggregators[name].get_smoothed_values()


def state_dict() -> dict[str, Any]:
    return {name: aggregator.state_dict() for name, aggregator in _aggregators.items()}


def load_state_dict(state_dict: dict[str, Any]) -> None:
    for name, state in state_dict.items():
        _aggregators[name] = MetersDict()
        _aggregators[name].load_state_dict(state)
