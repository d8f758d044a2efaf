"""Figures of the log: named sums, kept on the device,
and what is computed from them when a line is due.

A criterion names its own sums (``compute_loss`` returns them) and its own figures (``figures``
declares them). Sums are added over batches and reduced over ranks; a figure is computed on the host
from the totals, once, when it is shown.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fairseq.distributed import World
from fairseq.modules import devices

SIZE = "sample_size"
UPDATES = "updates added"
"""Name, among totals, of the number of updates, or batches of a validation, that they are summed
over."""
MOST_ADDED = 1000
"""Updates, or batches of a validation, that a meter keeps before it adds them up."""
STANDARD = ("loss", "nll_loss", "ntokens", "nsentences", SIZE)

Values = Mapping[str, Any]
"""Totals by name: a float for a sum, a CPU tensor [rows, …] for gathered predictions."""


@dataclass(frozen=True)
class Figure:
    """A number of the log, computed from totals by name.

    While one of the names *needs* is missing, it is not shown. Gathered predictions, e.g. for F1 or
    Matthews' correlation, are there in validation only.
    """

    compute: Callable[[Values], float]
    needs: tuple[str, ...] = ()

    def is_known(self, totals: Values) -> bool:
        return all(need in totals for need in self.needs)


def ratio(numerator: str, denominator: str, scale: float = 1.0) -> Figure:
    """The mean *numerator* / *denominator*, times *scale*; NaN where nothing was counted."""

    def compute(sums: Values) -> float:
        return scale * sums[numerator] / sums[denominator] if sums[denominator] else math.nan

    return Figure(compute, (numerator, denominator))


def perplexity(numerator: str = "nll_loss", denominator: str = "ntokens") -> Figure:
    """The perplexity of a loss summed in nats."""
    bits = ratio(numerator, denominator, 1 / math.log(2))
    return Figure(lambda sums: safe_power(bits.compute(sums)), bits.needs)


def language_model_figures() -> dict[str, Figure]:
    """``loss`` and ``nll_loss`` in bits a token, and ``ppl``, as fairseq logs them."""
    to_bits = 1 / math.log(2)
    return {
        "loss": ratio("loss", SIZE, to_bits),
        "nll_loss": ratio("nll_loss", "ntokens", to_bits),
        "ppl": perplexity(),
    }


@dataclass(frozen=True)
class NamedSums:
    """The sums of one or several batches as one vector,
    so that a single reduction serves all of them."""

    names: tuple[str, ...]  # what each entry is; the same on every rank, in the same order
    values: Tensor  # float64 [names], on the device, or on the host where that has no float64
    rows: Mapping[str, Tensor]  # gathered predictions by name, [rows, …] each

    @classmethod
    def of(cls, log: Mapping[str, object], sample_size: int, device: torch.device, gather: bool = False) -> NamedSums:
        """A criterion's sums as a vector on *device*, without a wait for it.

        *log* has numbers, tensors of one element, or :class:`Gathered` predictions, which are
        dropped without *gather*. *sample_size* is what the gradient is divided by.
        """
        if (as_sums := getattr(log, "as_sums", None)) is not None:  # a log that makes its figures itself
            made: NamedSums = as_sums(sample_size, device)
            return made
        host: dict[str, Any] = {"loss": 0.0, "ntokens": 0, "nsentences": 0, **log, SIZE: sample_size}
        # fairseq's log has both; they differ where a criterion adds a term.
        host.setdefault("nll_loss", host["loss"])
        rows = {name: value.rows for name, value in host.items() if isinstance(value, Gathered)} if gather else {}
        summed = {name: value for name, value in host.items() if _is_sum(value)}
        # One order on all ranks: their vectors are added as they are.
        names = (*STANDARD, *(name for name in summed if name not in STANDARD))
        # One copy to the device for all numbers together.
        numbers = [0.0 if isinstance(summed[name], Tensor) else float(summed[name]) for name in names]
        vector = devices.move(torch.tensor(numbers, dtype=torch.float64), devices.exact_device(device))
        # Written on the device: to read a tensor's value into the list above would synchronise.
        for index, name in enumerate(names):
            if isinstance(summed[name], Tensor):
                vector[index] = summed[name].detach().to(vector.device)
        return cls(names, vector, rows)

    def __add__(self, other: NamedSums) -> NamedSums:
        """Sums of both, without predictions, which :class:`RunningSums` keeps; names that only one
        has count as 0 in the other."""
        if self.names == other.names:
            return NamedSums(self.names, self.values + other.values, {})
        names = (*self.names, *(name for name in other.names if name not in self.names))
        values = torch.zeros(len(names), dtype=torch.float64, device=self.values.device)
        for part in (self, other):
            values[[names.index(name) for name in part.names]] += part.values
        return NamedSums(names, values, {})

    def gathered(self, world: World) -> NamedSums:
        """These sums, with the sums of a log that needs
        the outputs of all ranks; called on every rank."""
        return self

    def reduced(self, world: World) -> NamedSums:
        """The sums over all ranks: one reduction of the sums,
        and predictions of every rank in rank order."""
        if world.size == 1:
            return self
        rows = {
            name: torch.cat([part.to(value.device) for part in world.gather(value.cpu(), everywhere=True)])
            for name, value in self.rows.items()
        }
        # The sum is made in place, and these values may still be added to others.
        return NamedSums(self.names, world.sum(self.values.clone()), rows)

    def __getitem__(self, name: str) -> Tensor:
        """One sum, still on the device."""
        return self.values[self.names.index(name)]


def figures_of(figures: Mapping[str, Figure], totals: Values) -> Mapping[str, Figure]:
    """Those of *figures* that *totals* may have: all, unless they are known by the totals alone."""
    of: Callable[[Values], Mapping[str, Figure]] | None = getattr(figures, "of", None)
    return figures if of is None else of(totals)


@dataclass(frozen=True)
class Gathered:
    """Predictions of a batch, [rows, …], that a figure wants all of: kept in validation, over
    batches and ranks."""

    rows: Tensor


class RunningSums:
    """Running sums of a part of a run: an update's interval, an epoch, a validation.

    What is added is kept until the sums are read: an update launches nothing for them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = devices.exact_device(device)
        self.reset()

    def reset(self) -> None:
        self._totals = NamedSums(STANDARD, torch.zeros(len(STANDARD), dtype=torch.float64, device=self.device), {})
        self._means: dict[str, Tensor] = {}  # sums over updates
        self._added: list[tuple[NamedSums, dict[str, Tensor]]] = []  # which these do not contain yet
        self.predictions: dict[str, list[Tensor]] = {}  # gathered ones, of each batch
        self.updates = 0

    def add(self, sums: NamedSums, **means: Tensor) -> None:
        """Add one update's *sums*, and *means*: values that are averaged over updates."""
        self._added.append((sums, means))
        # Joined once, at the end: joined to those before, each batch would copy all of them.
        for name, rows in sums.rows.items():
            self.predictions.setdefault(name, []).append(rows)
        self.updates += 1
        if len(self._added) == MOST_ADDED:
            self._add_up()

    @property
    def totals(self) -> NamedSums:
        """The sums so far."""
        self._add_up()
        return self._totals

    @property
    def means(self) -> dict[str, Tensor]:
        """Sums over updates of the values that are averaged."""
        self._add_up()
        return self._means

    def _add_up(self) -> None:
        """Add what is kept, one after the other: when the sums are read must change no bit of
        them."""
        added, self._added = self._added, []
        for (kind, names), several in itertools.groupby(
            (sums for sums, _ in added), lambda sums: (type(sums), sums.names)
        ):
            first, *others = several
            self._totals = self._totals + first
            if kind is NamedSums and self._totals.names == names:
                self._totals = replace(self._totals, values=_running(self._totals.values, [x.values for x in others]))
            else:
                self._totals = sum(others, self._totals)
        for name in dict.fromkeys(name for _, means in added for name in means):
            values = [means[name].detach().to(self.device) for _, means in added if name in means]
            # In float64: over a long epoch a float32 sum would lose the digits of its last terms.
            start = self._means.get(name, torch.zeros((), dtype=torch.float64, device=self.device))
            self._means[name] = _running(start, values)

    def reduce(self, world: World) -> None:
        """Reduce the totals over ranks, each of which has added its own."""
        rows = {name: torch.cat(batches) for name, batches in self.predictions.items()}
        self._totals = replace(self.totals, rows=rows).reduced(world)
        self.predictions = {name: [everyone] for name, everyone in self._totals.rows.items()}

    def report(self, figures: Mapping[str, Figure]) -> dict[str, float]:
        """*figures*, ``wpb`` (tokens an update), ``bsz`` (rows an update) and the means;
        synchronises with the device.

        Figures are NaN where nothing was added,
        so that neither 0 nor a perplexity of 1 looks like a result.
        """
        totals: dict[str, Any] = dict(zip(self.totals.names, self.totals.values.tolist(), strict=True))
        totals |= {name: torch.cat(batches).cpu() for name, batches in self.predictions.items()}
        updates = totals[UPDATES] = max(self.updates, 1)
        known = {name: figure for name, figure in figures_of(figures, totals).items() if figure.is_known(totals)}
        # What a criterion's own figure makes of no totals at all is not known, so it is not asked.
        result = {name: float(figure.compute(totals)) if self.updates else math.nan for name, figure in known.items()}
        result |= {"wpb": totals["ntokens"] / updates, "bsz": totals["nsentences"] / updates}
        return {**result, **{name: float(value) / updates for name, value in self.means.items()}}

    def copy(self) -> RunningSums:
        """The sums so far, which later ones do not change."""
        result = RunningSums(self.device)
        result._totals, result._means, result.updates = self.totals, dict(self.means), self.updates
        return result

    def since(self, before: RunningSums) -> RunningSums:
        """The sums that were added to these after they were copied as *before*, without means."""
        result = RunningSums(self.device)
        former = before.totals
        result._totals = self.totals + NamedSums(former.names, -former.values, {})
        result.updates = self.updates - before.updates
        return result

    @property
    def tokens(self) -> float:
        """Target tokens so far."""
        return float(self.totals["ntokens"])

    def state_dict(self) -> dict[str, Any]:
        """Names and totals, as plain values and tensors on the CPU."""
        return {
            "names": list(self.totals.names),
            "totals": self.totals.values.cpu(),
            "figures": {name: value.cpu() for name, value in self.means.items()},
            "updates": self.updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a meter, or raise ValueError."""
        names, totals, means = tuple(state["names"]), state["totals"], state["figures"]
        known = names[: len(STANDARD)] == STANDARD and all(isinstance(name, str) for name in (*names, *means))
        if not known or len(set(names)) != len(names) or totals.shape != (len(names),):
            raise ValueError("sums: names and totals do not belong together")
        if not all(value.numel() == 1 for value in means.values()) or not state["updates"] >= 0:
            raise ValueError("sums: means of updates are no single numbers")
        self.reset()
        self._totals = NamedSums(names, totals.to(self.device, torch.float64, copy=True), {})
        self._means = {name: value.to(self.device, torch.float64) for name, value in means.items()}
        self.updates = int(state["updates"])


def _running(total: Tensor, values: Sequence[Tensor]) -> Tensor:
    """*total* plus *values*, in this order, in the type of *total*."""
    if not values:
        return total
    # A checkpoint would store all rows of a view.
    return torch.stack([total, *values]).cumsum(0)[-1].clone()


def safe_power(bits: float) -> float:
    """2 to the power of *bits*, infinite where it is too large for a float."""
    # From 2 ** 1024 on Python raises an error.
    return math.inf if bits >= 1000 else 2.0**bits


def _is_sum(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float)
