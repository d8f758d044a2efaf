"""The mean of a model's weights over updates (Polyak & Juditsky 1992; in language models, Merity et al. 2018)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class WeightAverage:
    """The mean of *parameters* after each update from number *start* on.

    Args:
        parameters: those that the optimizer changes.
        start: the first update that counts.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], start: int) -> None:
        self.parameters = list(parameters)
        self.start = start
        self.count = 0
        self.mean: list[Tensor] = []

    @torch.no_grad()
    def update(self, num_updates: int) -> None:
        """Take in the weights as they are after update *num_updates*."""
        if num_updates < self.start:
            return
        self.count += 1
        if self.count == 1:
            self.mean = [p.detach().clone() for p in self.parameters]
        else:
            torch._foreach_lerp_(self.mean, [p.detach() for p in self.parameters], 1 / self.count)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the parameters are the mean; without one yet, what they are."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def state_dict(self) -> dict[str, Any]:
        """The number of updates in the mean, and the weights that training goes on from; the model's are the mean."""
        return {"count": self.count, "weights": [p.detach().cpu() for p in self.parameters] if self.count else []}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from *state*, saved while the parameters, as they are now, were the mean."""
        self.count = int(state["count"])
        self.mean = [p.detach().clone() for p in self.parameters] if self.count else []
        restore_weights(self.parameters, state)

    def _exchange(self) -> None:
        for number, mean in enumerate(self.mean):
            self.mean[number], self.parameters[number].data = self.parameters[number].data, mean


@torch.no_grad()
def restore_weights(parameters: Sequence[torch.nn.Parameter], state: Mapping[str, Any]) -> None:
    """Give *parameters* the weights that training had reached when *state* was saved."""
    for parameter, weight in zip(parameters, state["weights"], strict=False):
        parameter.copy_(weight)
