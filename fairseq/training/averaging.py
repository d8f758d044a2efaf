"""The mean of a model's weights over updates (Polyak & Juditsky 1992;
in language models, Merity et al. 2018)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq.config.settings import OptimizationConfig
from fairseq.errors import UserError
from fairseq.modules import devices


class WeightAverage:
    """The mean of *parameters* after each update from number *start* on.

    Weights that are n updates old count *decay*^n: with 1 all alike, with 0 the last alone. The
    weighted mean is exact from the first update on, so that initial weights have no part in it.

    It is in float32 whatever the parameters are, with a *decay* of 1 in float64, where the device
    has that: the share of the last update becomes too small for float32.

    Of a table with sparse gradients, an update reads and writes only the rows that it changes. The
    mean of another row is that of some earlier update, whose number :attr:`row_counts` has: weights
    that stay as they are can be added to it at any later time, together.

    Attributes:
        count: updates in the mean.
        mean: of each parameter.
        row_counts: by the index of a table, the updates in the mean of each row.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], start: int, decay: float = 1.0) -> None:
        self.parameters = list(parameters)
        self.start = start
        self.decay = decay
        self.count = 0
        self.mean: list[Tensor] = []
        self.row_counts: dict[int, Tensor] = {}

    @torch.no_grad()
    def before_update(self) -> None:
        """Add the weights of the rows that the next update changes, which their gradients tell, to
        the mean: for all updates since they changed last."""
        if not self.count:
            return
        for index, p in enumerate(self.parameters):
            if p.grad is None or not p.grad.is_sparse:
                continue
            if index not in self.row_counts:
                self.row_counts[index] = torch.full((len(p),), self.count, device=p.device)
            rows, mean, counts = p.grad.indices()[0], self.mean[index], self.row_counts[index]
            mean[rows] = self._up_to_date(mean[rows], p[rows], counts[rows])
            counts[rows] = self.count

    @torch.no_grad()
    def update(self, num_updates: int) -> None:
        """Add the weights after update *num_updates* to the mean."""
        if num_updates < self.start:
            return
        self.count += 1
        if self.count == 1:
            self.mean = [p.detach().to(self._dtype(p), copy=True) for p in self.parameters]
        else:
            # The last update's weight in the mean: 1 / (1 + decay + … + decay^(count − 1)).
            share = 1 / self.count if self.decay == 1 else (1 - self.decay) / (1 - self.decay**self.count)
            whole = [index for index in range(len(self.mean)) if index not in self.row_counts]
            # In the precision of the mean, whatever the weights are in.
            means = [self.mean[index] for index in whole]
            torch._foreach_mul_(means, 1 - share)
            torch._foreach_add_(means, [self.parameters[index].detach() for index in whole], alpha=share)

    def means(self) -> Iterator[Tensor]:
        """The mean of each parameter after the last update."""
        for index, (mean, p) in enumerate(zip(self.mean, self.parameters, strict=bool(self.count))):
            counts = self.row_counts.get(index)
            yield mean if counts is None else self._up_to_date(mean, p.detach(), counts)

    def _up_to_date(self, mean: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """The mean of rows, *mean* [N, C] after *counts* [N] updates, whose *weights* [N, C] have
        been the same since."""
        counts = counts.to(torch.float64 if devices.has_float64(counts.device) else torch.float32)
        kept = counts / self.count
        if self.decay < 1:
            kept = self.decay ** (self.count - counts) * (1 - self.decay**counts) / (1 - self.decay**self.count)
        return weights.to(mean.dtype, copy=True).lerp_(mean, kept.to(mean.dtype)[:, None])

    def _dtype(self, parameter: Tensor) -> torch.dtype:
        return torch.float64 if self.decay == 1 and devices.has_float64(parameter.device) else torch.float32

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Set the parameters to the mean inside the ``with`` block; without a mean, leave them.

        Their values are set, not their tensors, which may be parts of others.
        """
        weights = [p.detach().clone() for p in self.parameters] if self.count else []
        self._set(self.means())
        try:
            yield
        finally:
            self._set(weights)

    @torch.no_grad()
    def _set(self, values: Iterable[Tensor]) -> None:
        # Without a mean there are no values, and the parameters stay.
        for parameter, value in zip(self.parameters, values, strict=bool(self.count)):
            parameter.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """The mean, the number of updates in it and in its rows, and the weights that training goes
        on from; all of them live."""
        weights = [p.detach() for p in self.parameters] if self.count else []
        rows = {"row_counts": dict(self.row_counts)} if self.row_counts else {}
        return {"count": self.count, "mean": list(self.mean), "weights": weights, **rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore *state*."""
        self.count = int(state["count"])
        # A state without a mean is of a run that had not reached the first update of it.
        pairs = zip(state["mean"], self.parameters, strict=bool(self.count))
        _check_shapes(self.parameters, state["mean"])
        self.mean = [mean.to(p.device, self._dtype(p), copy=True) for mean, p in pairs]
        stored = state.get("row_counts") or {}
        _check_shapes([self.mean[index][:, 0] for index in stored], list(stored.values()))
        self.row_counts = {
            index: counts.to(self.mean[index].device, torch.long, copy=True) for index, counts in stored.items()
        }
        restore_weights(self.parameters, state)


def weight_average(cfg: OptimizationConfig, parameters: Sequence[torch.nn.Parameter]) -> WeightAverage | None:
    """The mean of *parameters* that *cfg* asks for; None if it asks for none."""
    if cfg.average_weights_from is None and cfg.ema_decay is None:
        return None
    return WeightAverage(parameters, cfg.average_weights_from or 1, 1.0 if cfg.ema_decay is None else cfg.ema_decay)


def _check_shapes(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Raise UserError if *values* have other shapes; copying would broadcast them."""
    if any(value.shape != p.shape for value, p in zip(values, parameters, strict=False)):
        raise UserError("checkpoint: its averaged weights have other shapes; use another or `reset_optimizer`")


@torch.no_grad()
def restore_weights(parameters: Sequence[torch.nn.Parameter], state: Mapping[str, Any]) -> None:
    """Set *parameters* to the weights that training had reached when *state* was saved."""
    _check_shapes(parameters, state["weights"])
    for parameter, weight in zip(parameters, state["weights"], strict=bool(state["count"])):
        parameter.copy_(weight)
