"""Logging outputs of criterions in fairseq's sense, and the figures that ``reduce_metrics`` makes
of them.

As in fairseq, it is called once an update with the outputs of all batches and processes, and once a
batch of validation. What it logs becomes sums and weights of :mod:`fairseq.logging.figures`, whose
ratio over several updates is the mean that fairseq's meters give.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq.data.dataset import Sample
from fairseq.distributed import World
from fairseq.logging import metrics
from fairseq.logging.figures import STANDARD, Figure, Gathered, NamedSums, Values
from fairseq.logging.meters import AverageMeter, MetersDict, SumMeter
from fairseq.utils import item

SUM, WEIGHT, TOTAL = "sum of ", "weight of ", "total of "  # in the names of sums, before a figure's
OF_THE_LOG = ("wpb", "bsz", "ups", "wps")  # which the log has by itself
_derived: dict[str, Callable[[MetersDict], object]] = {}  # functions of meters, by figure: no sums can hold them


class Logged(dict[str, Any]):
    """The logging output of one batch, under the step *graph* that made it."""

    graph: Any
    outputs: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, log: Any, loss: object, sample: Sample, graph: object) -> Logged:
        values = dict(log or {})
        # What the log of every run shows, where the plug-in does not name it.
        host = {"loss": loss, "ntokens": sample.get("ntokens", 0), "nsentences": sample.get("nsentences", 0)}
        logged = cls({name: item(values.get(name, value)) for name, value in host.items()})
        logged.graph, logged.outputs = graph, (values,)
        return logged

    def as_sums(self, sample_size: int, device: torch.device) -> LoggingSums:
        """These outputs as sums of :class:`NamedSums`."""
        plain = NamedSums.of(dict(self), sample_size, device)
        steps = (self.outputs,)
        return LoggingSums(plain.names[: len(STANDARD)], plain.values[: len(STANDARD)], {}, steps, self.graph)


def without_outputs(log: Any) -> Any:
    """*log* of a batch that counts nothing."""
    nothing = type(log)({name: 0 for name, value in log.items() if not isinstance(value, Gathered)})
    if isinstance(log, Logged):
        nothing.graph, nothing.outputs = log.graph, ()
    return nothing


@dataclass(frozen=True)
class LoggingSums(NamedSums):
    """Standard sums, and the logging outputs of *steps*: updates, or batches of validation."""

    steps: tuple[tuple[Mapping[str, object], ...], ...]
    graph: Any

    def __add__(self, other: NamedSums) -> NamedSums:
        return self._joined(other, self.steps, other.steps if isinstance(other, LoggingSums) else ())

    # Called first where a plain one stands on the left: the class is a subclass of its.
    def __radd__(self, other: NamedSums) -> NamedSums:
        return self._joined(other, (), self.steps)

    def _joined(self, other: NamedSums, before: Any, after: Any) -> LoggingSums:
        both = NamedSums.__add__(NamedSums(other.names, other.values, other.rows), self._plain())
        # Batches of one update are one step.
        joins = self.graph.training and before and after
        steps = (tuple(itertools.chain(*before, *after)),) if joins else (*before, *after)
        return LoggingSums(both.names, both.values, both.rows, steps, self.graph)

    def _plain(self) -> NamedSums:
        return NamedSums(self.names, self.values, self.rows)

    def gathered(self, world: World) -> NamedSums:
        """Sums of the figures, on the first process all of them, so that a reduction gives each
        process the totals."""
        everyone = world.gather(_on_host(self.steps), everywhere=True) if world.size > 1 else [self.steps]
        plain = self._plain()
        # Ranks have as many steps each; names may differ between them, because a criterion logs
        # what it has.
        for outputs in itertools.zip_longest(*everyone, fillvalue=()):
            logged = self._reduced([output for of_rank in outputs for output in of_rank])
            values = list(logged.values()) if world.is_first else [0.0] * len(logged)
            vector = torch.tensor(values, dtype=torch.float64, device=plain.values.device)
            plain = plain + NamedSums(tuple(logged), vector, {})
        return plain

    def reduced(self, world: World) -> NamedSums:
        return self.gathered(world).reduced(world)

    def _reduced(self, outputs: list[Mapping[str, object]]) -> dict[str, float]:
        """Sums and weights of the figures that ``reduce_metrics`` logs of *outputs*."""
        if not outputs:
            return {}
        with metrics.aggregate(new_root=True) as meters:
            self.graph.task.reduce_metrics(outputs, self.graph.criterion)
        sums: dict[str, float] = {}
        arrays = {name for name, meter in meters.items() if _has_array(meter)}
        for name, meter in meters.items():
            if name in OF_THE_LOG or name in arrays or _reads(meter, meters, arrays):
                continue
            if isinstance(meter, SumMeter):
                sums[TOTAL + name] = float(item(meter.sum))
            elif isinstance(meter, AverageMeter) and meter.val is not None:
                weight = float(item(meter.count))
                sums[SUM + name] = float(item(meter.sum)) if weight else 0.0
                sums[WEIGHT + name] = weight
            elif isinstance(meter, MetersDict.Derived):
                _derived[name] = meter.fn
                sums[TOTAL + name] = 0.0
        return sums


def _has_array(meter: object) -> bool:
    """Whether *meter* has several numbers, such as one for every class, which no log shows."""
    return isinstance(meter, SumMeter | AverageMeter) and torch.as_tensor(meter.sum).numel() != 1


def _reads(meter: object, meters: MetersDict, arrays: Collection[str]) -> bool:
    """Whether *meter* is computed from one of the *arrays* among *meters*: it has no sum."""
    if not arrays or not isinstance(meter, MetersDict.Derived):
        return False
    numbers = MetersDict()
    numbers.update({name: each for name, each in meters.items() if name not in arrays})
    try:
        meter.fn(numbers)
    except KeyError as error:
        return error.args[0] in arrays
    except ArithmeticError:
        pass  # of these outputs alone
    return False


def _on_host(value: object) -> Any:
    """*value* with numbers and tensors of the host."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value.cpu()
    if isinstance(value, Mapping):
        return {name: _on_host(each) for name, each in value.items()}
    return tuple(map(_on_host, value)) if isinstance(value, tuple) else value


class LoggedFigures(Mapping[str, Figure]):
    """The figures of totals, whatever their names are."""

    are_open = True

    def of(self, totals: Values) -> dict[str, Figure]:
        """The figures that *totals* have sums of."""
        names = dict.fromkeys(
            name.removeprefix(prefix) for name in totals for prefix in (SUM, TOTAL) if name.startswith(prefix)
        )
        return {name: self[name] for name in names}

    def __getitem__(self, name: str) -> Figure:
        return Figure(lambda totals: float(item(meters_of(totals).get_smoothed_value(name))))

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def meters_of(totals: Values) -> MetersDict:
    """The meters that *totals* stand for."""
    meters = MetersDict()
    for name in totals:
        meter: Any = None
        if name.startswith(SUM):
            figure, meter = name.removeprefix(SUM), AverageMeter()
            weight = totals[WEIGHT + figure]
            meter.val, meter.sum, meter.count = (totals[name] / weight if weight else 0.0), totals[name], weight
        elif name.startswith(TOTAL):
            figure = name.removeprefix(TOTAL)
            meter = MetersDict.Derived(_derived[figure]) if figure in _derived else SumMeter()
            if isinstance(meter, SumMeter):
                meter.sum = totals[name]
        if meter is not None:
            meters.add_meter(figure, meter, 0)
    return meters
